"""Supervised fine-tuning: TRL's trainer over prepared rows."""

from __future__ import annotations

from typing import Any

import trl

from recipes_lib.models.quantization import keeping_precision
from recipes_lib.training.next_token import NextTokenTrainer


class SFTTrainer(NextTokenTrainer, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer with the objective, the evaluation and the checkpoints of ``NextTokenTrainer``."""

    def __init__(self, **kwargs: Any) -> None:
        """Set TRL's trainer up.

        Args:
            **kwargs: As ``NextTokenTrainer``; ``model`` may be under an adapter.
        """
        with keeping_precision(kwargs["model"]):
            super().__init__(**kwargs)

    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""

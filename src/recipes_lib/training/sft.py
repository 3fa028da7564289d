"""Supervised fine-tuning: TRL's trainer over prepared rows."""

from __future__ import annotations

from typing import Any

import trl

from recipes_lib.training.next_token import NextTokenTrainer


class SFTTrainer(NextTokenTrainer, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer with the objective, the evaluation and the checkpoints of ``NextTokenTrainer``."""

    def __init__(self, **kwargs: Any) -> None:
        """Set TRL's trainer up.

        Args:
            **kwargs: As ``NextTokenTrainer``; ``model`` may be under an adapter.
        """
        parameters = kwargs["model"].parameters() if getattr(kwargs["model"], "is_quantized", False) else ()
        weights = [(parameter, parameter.data) for parameter in parameters if parameter.requires_grad]
        super().__init__(**kwargs)
        # TRL rounds an adapter on a quantised model to bfloat16, in which small updates are lost.
        for parameter, data in weights:
            parameter.data = data

    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""

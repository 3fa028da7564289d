"""Supervised fine-tuning: TRL's trainer over prepared rows."""

from __future__ import annotations

import trl

from recipes_lib.training.next_token import NextTokenTrainer


class SFTTrainer(NextTokenTrainer, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer with the objective, the evaluation and the checkpoints of ``NextTokenTrainer``."""

    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""

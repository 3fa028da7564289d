"""Supervised fine-tuning: TRL's trainer over prepared rows."""

from __future__ import annotations

from typing import Any

import torch
import trl

from recipes_lib.training.next_token import NextTokenTrainer
from recipes_lib.training.optimizers import split_loraplus_groups


class SFTTrainer(NextTokenTrainer, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer with the objective, the evaluation and the checkpoints of ``NextTokenTrainer``."""

    def __init__(self, *, loraplus_lr_ratio: float | None = None, **kwargs: Any) -> None:
        """Set TRL's trainer up.

        Args:
            loraplus_lr_ratio: Learning rate of an adapter's B matrices over that of its A matrices.
            **kwargs: As ``NextTokenTrainer``; ``model`` may be under an adapter.
        """
        self.loraplus_lr_ratio = loraplus_lr_ratio
        parameters = kwargs["model"].parameters() if getattr(kwargs["model"], "is_quantized", False) else ()
        weights = [(parameter, parameter.data) for parameter in parameters if parameter.requires_grad]
        super().__init__(**kwargs)
        # TRL rounds an adapter on a quantised model to bfloat16, in which small updates are lost.
        for parameter, data in weights:
            parameter.data = data

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer by name, and give the B matrices their rate."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new and self.loraplus_lr_ratio is not None:
            split_loraplus_groups(optimizer, self.model if model is None else model, self.loraplus_lr_ratio)
        return optimizer

    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""

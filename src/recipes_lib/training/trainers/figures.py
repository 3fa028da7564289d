"""Figures beside the loss: means over the terms of the objective, pairs or tokens, of all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.collectives import sum_over_processes


class TermFigures(TrainerCallback):
    """Adds the means over all terms of the objective since the last log to the figures of a logged step.

    Source: ``tests/training/trainers/test_figures.py``, ``tests/distributed/test_pairs.py``.
    """

    def __init__(self) -> None:
        """Start with no term."""
        self._num_terms: int | Tensor = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], num_terms: int | Tensor) -> None:
        """Add a batch of this process; scalars stay on their device, so nothing waits for it."""
        self._num_terms += num_terms
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget what a rollback has undone."""
        self._num_terms, self._sums = 0, {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Hand the figures of all processes to whoever logs a training step."""
        if logs is None or "loss" not in logs:
            return
        names = sorted(self._sums)
        own = torch.stack([self._sums[name] for name in names]).tolist() if names else []
        num_terms, *sums = sum_over_processes([int(self._num_terms), *own])
        if num_terms:
            logs.update({name: value / num_terms for name, value in zip(names, sums, strict=True) if name != "loss"})
        self._num_terms, self._sums = 0, {}

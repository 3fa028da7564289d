"""What the stages that compare answers share: a mean over pairs, and figures of pairs beside the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.metrics import sum_over_processes
from recipes_lib.training.pair_batches import Batch, PairScores, count_pairs
from recipes_lib.training.recipe_trainer import RecipeTrainer


class PairFigures(TrainerCallback):
    """Adds the means over all pairs since the last log to the figures of a logged step.

    Source: ``tests/training/test_pair_trainer.py``.
    """

    def __init__(self) -> None:
        """Start with no pair."""
        self._num_pairs = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], num_pairs: int) -> None:
        """Add a batch of this process; scalars stay on their device, so nothing waits for it."""
        self._num_pairs += num_pairs
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

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
        num_pairs, *sums = sum_over_processes([self._num_pairs, *(float(self._sums[name]) for name in names)])
        if num_pairs:
            logs.update({name: value / num_pairs for name, value in zip(names, sums, strict=True) if name != "loss"})
        self._num_pairs, self._sums = 0, {}


class PairTrainer(RecipeTrainer):
    """``RecipeTrainer`` whose objective is a mean over pairs."""

    router_aux_loss_coef = 0.0

    def __init__(self, **kwargs: Any) -> None:
        """Set the trainer up.

        Args:
            **kwargs: As ``RecipeTrainer``; ``data_collator`` is a ``PairCollator``.
        """
        super().__init__(**kwargs)
        self.figures = PairFigures()
        # Before the one that writes, which puts down what the figures are by then.
        self.callback_handler.callbacks.insert(1, self.figures)

    @abstractmethod
    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch."""

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the number of pairs."""
        return torch.tensor(count_pairs(batch))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this process's share of the step's mean loss of a pair."""
        scores = self.score_pairs(model, inputs)
        num_pairs = len(scores.losses) if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, while num_pairs counts all of them.
        loss = scores.losses.sum() * (self.accelerator.num_processes / num_pairs)
        if scores.aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * scores.aux_loss / self.current_gradient_accumulation_steps
        self.figures.add(scores.sums(), len(scores.losses))
        self.observer.counter.add(inputs["num_tokens"], scores.num_targets, scores.num_correct)
        return (loss, scores) if return_outputs else loss

"""What the stages that compare answers share: a mean over pairs, and figures of pairs beside the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recipes_lib.training.trainers.figures import TermFigures
from recipes_lib.training.trainers.pair_batches import Batch, PairScores, count_pairs
from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer


class PairTrainer(RecipeTrainer):
    """``RecipeTrainer`` whose objective is a mean over pairs.

    How the pairs of a step are cut into batches and shared by processes changes nothing, in the last step of an epoch
    too (``tests/distributed/test_pairs.py``).
    """

    def __init__(self, **kwargs: Any) -> None:
        """Set the trainer up.

        Args:
            **kwargs: As ``RecipeTrainer``; ``data_collator`` is a ``PairCollator``.
        """
        super().__init__(**kwargs)
        self.figures = TermFigures()
        # Before the one that writes, which puts down what the figures are by then.
        self.callback_handler.callbacks.insert(1, self.figures)

    @abstractmethod
    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch."""

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the number of pairs."""
        return torch.tensor(count_pairs(batch))

    def leave_out(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with pairs that do not count."""
        return {**batch, "num_counted_pairs": 0, "num_tokens": torch.zeros_like(batch["num_tokens"])}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this process's share of the step's mean loss of a pair."""
        scores = self.score_pairs(model, inputs)
        counted = count_pairs(inputs)
        num_pairs = counted if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, while num_pairs counts all of them.
        loss = scores.losses[:counted].sum() * (self.accelerator.num_processes / num_pairs)
        if scores.aux_loss is not None:
            loss = loss + self.weigh_aux_loss(scores.aux_loss, inputs["num_tokens"])
        self.figures.add(scores.sums(counted), counted)
        if counted:
            self.observer.counter.add(inputs["num_tokens"], scores.num_targets, scores.num_correct)
        return (loss, scores) if return_outputs else loss

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """While it lasts, what is computed does not count as training."""
        figures, self.figures = self.figures, TermFigures()
        try:
            with super().rehearsal():
                yield
        finally:
            self.figures = figures

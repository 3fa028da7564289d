"""Held-out pairs: the loss, and how often and by how much the chosen answer wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from recipes_lib.errors import DataError, Problem
from recipes_lib.training.hooks.training_state import preserve_training_state
from recipes_lib.training.metrics import sum_over_processes
from recipes_lib.training.pair_batches import Batch, PairScores
from recipes_lib.training.progress import TrainingProgress
from recipes_lib.training.row_sharing import Rows, count_rounds, share_rows


class EvaluatePairs:
    """Scores held-out pairs; the figures do not depend on how they are cut into batches or shared by processes.

    Memory does not grow with the set. Weights, modes and random states are untouched.

    Source: ``tests/training/hooks/test_pair_evaluation.py``.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        collate: Callable[[list[Mapping[str, Any]]], Batch],
        score: Callable[[nn.Module, Batch], PairScores],
        progress: TrainingProgress,
    ) -> None:
        """Prepare an evaluation.

        Args:
            rows: The held-out pairs, whole and the same on every process.
            batch_size: Pairs of a batch on each process.
            collate: Pairs to a batch.
            score: Scores a batch.
            progress: Shows how far the evaluation is.

        Raises:
            DataError: There are none.
        """
        if len(rows) == 0:
            raise DataError(Problem("the held-out set", "holds no pair", "name another dataset_test_split"))
        self._rows = rows
        self._batch_size = batch_size
        self._collate = collate
        self._score = score
        self._progress = progress

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the mean over pairs of the loss and of every figure of the objective, and the error of accuracy."""
        began = time.perf_counter()
        sums: dict[str, float] = {}
        num_rounds = count_rounds(len(self._rows), self._batch_size)
        with preserve_training_state(model):
            shares = share_rows(len(self._rows), self._batch_size)
            for numbers, is_counted in self._progress.track(shares, "evaluate", num_rounds):
                scores = self._score(model, self._collate([self._rows[number] for number in numbers]))
                for name, value in scores.sums().items():
                    # Added up as Python numbers: a double on every kind of device.
                    sums[name] = sums.get(name, 0.0) + is_counted * float(value)
        names = sorted(sums)
        totals = sum_over_processes([sums[name] for name in names])
        figures = {name: total / len(self._rows) for name, total in zip(names, totals, strict=True)}
        share = figures.get("rewards/accuracies")
        if share is not None:
            figures["rewards/accuracies_stderr"] = math.sqrt(share * (1 - share) / len(self._rows))
        return {**figures, "num_pairs": len(self._rows), "seconds": time.perf_counter() - began}

"""Held-out evaluation: loss, perplexity, bits per byte and accuracy of tokens, and the metrics of pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, distributed, nn

from recipes_lib.errors import DataError, Problem
from recipes_lib.models.inference import find_device, preserve_training_state
from recipes_lib.training.collectives import get_rank, get_world_size, sum_over_processes
from recipes_lib.training.guards.preemption import stop_if_agreed
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import PairScores


class Rows(Protocol):
    """Rows that are read by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def count_rounds(num_rows: int, batch_size: int, group: distributed.ProcessGroup | None = None) -> int:
    """Return how many batches each process takes."""
    return math.ceil(num_rows / (batch_size * get_world_size(group)))


def share_rows(
    num_rows: int, batch_size: int, group: distributed.ProcessGroup | None = None
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the numbers of the rows of this process's batches, and whether they count.

    Between two batches all processes of the run agree whether to stop: all of them take the same number, those outside
    of ``group`` in groups of their own.

    A process that has run out of rows repeats the first ones uncounted: where weights are sharded, the others wait for
    it in every forward pass.

    Raises:
        PreemptedError: A process was asked to stop while training.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_evaluation.py``.
    """
    rank, world_size = get_rank(group), get_world_size(group)
    num_batches = math.ceil(num_rows / batch_size)
    for index in range(rank, count_rounds(num_rows, batch_size, group) * world_size, world_size):
        stop_if_agreed()
        is_counted = index < num_batches
        start = index * batch_size if is_counted else 0
        yield range(start, min(start + batch_size, num_rows)), is_counted


Batch = dict[str, Any]


class _Sums(NamedTuple):
    nll: float
    num_targets: float
    num_correct: float
    num_bytes: float

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nll / self.num_targets

    @property
    def bits_per_byte(self) -> float:
        """Bits for each byte of the targets' text."""
        return self.nll / math.log(2) / self.num_bytes


class EvaluateLoss:
    """Scores the held-out sets; the figures do not depend on batch size or number of ranks.

    All are means over target tokens: of whole sets, never of batch means; of all sets together, and where there are
    several, of each one as well. Bits per byte are all nats over
    ``ln 2`` times the bytes of the target tokens' text: terminators cost nats and have no bytes, so that an answer
    which does not end is paid for. The figure compares models of different vocabularies on the same text.

    Memory does not grow with the set. Weights, modes and random states are untouched.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_evaluation.py``.
    """

    def __init__(
        self,
        held_out: Mapping[str, Rows],
        *,
        batch_size: int,
        collate: Callable[[list[Mapping[str, Any]]], Batch],
        progress: TrainingProgress,
        byte_lengths: Tensor | None = None,
        group: distributed.ProcessGroup | None = None,
        sums_group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Prepare an evaluation.

        Args:
            held_out: The held-out sets by name, whole and the same on every process.
            batch_size: Rows of a batch on each process.
            collate: Rows to a batch with ``labels``, unshifted, negative where there is no target.
            progress: Shows how far the evaluation is.
            byte_lengths: Bytes of text of each id, ``int64 (V,)``, 0 for special tokens; ``None``: no bits per byte.
            group: Processes that take rows in turn; ``None`` is all of them.
            sums_group: Processes whose sums together are those of all rows; ``None`` is all of them.

        Raises:
            DataError: A set has no rows.
        """
        for name, rows in held_out.items():
            if len(rows) == 0:
                raise DataError(Problem(name, "holds no row", "name another dataset_test_split"))
        self._held_out = held_out
        self._batch_size = batch_size
        self._collate = collate
        self._progress = progress
        self._byte_lengths = byte_lengths
        self._group, self._sums_group = group, sums_group

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return ``loss`` (nats per target), ``perplexity``, ``bits_per_byte``, ``token_accuracy``, and what it took.

        Where there are several sets, ``loss_NAME`` and ``bits_per_byte_NAME`` besides.

        Raises:
            DataError: No token of a held-out set is a target.
        """
        began = time.perf_counter()
        sums = {name: self._sum(model, name) for name in self._held_out}
        together = _Sums(*(sum(column) for column in zip(*sums.values(), strict=True)))
        figures = {
            "loss": together.loss,
            "perplexity": _exp(together.loss),
            "token_accuracy": together.num_correct / together.num_targets,
            "num_target_tokens": together.num_targets,
            "seconds": time.perf_counter() - began,
        }
        if together.num_bytes:
            figures["bits_per_byte"] = together.bits_per_byte
        if len(sums) > 1:
            figures |= {f"loss_{name}": part.loss for name, part in sums.items()}
            figures |= {f"bits_per_byte_{name}": part.bits_per_byte for name, part in sums.items() if part.num_bytes}
        return figures

    def _sum(self, model: nn.Module, name: str) -> _Sums:
        """Score one set, on all processes together.

        Raises:
            DataError: None of its tokens is a target.
        """
        rows = self._held_out[name]
        sums = _Sums(0.0, 0, 0, 0)
        what = "evaluate" if len(self._held_out) == 1 else f"evaluate {name}"
        with preserve_training_state(model):
            shares = share_rows(len(rows), self._batch_size, self._group)
            num_rounds = count_rounds(len(rows), self._batch_size, self._group)
            for numbers, is_counted in self._progress.track(shares, what, num_rounds):
                scored = self._score(model, self._collate([rows[number] for number in numbers]))
                if is_counted:
                    sums = _Sums(*(total + value for total, value in zip(sums, scored, strict=True)))
        sums = _Sums(*sum_over_processes(sums, self._sums_group))
        if sums.num_targets == 0:
            raise DataError(Problem(name, "no token is a target", "see it with `recipes preview`"))
        return sums

    def _score(self, model: nn.Module, batch: Batch) -> tuple[float, int, int, int]:
        device = find_device(model)
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        scored = model(**{name: inputs[name] for name in inputs.keys() - {"num_tokens", "row_ids"}}, loss_head=True)
        num_bytes = 0
        if self._byte_lengths is not None:
            labels: Tensor = batch["labels"].cpu()
            num_bytes = int(self._byte_lengths[labels[labels >= 0]].sum())
        # Added up as Python numbers: exact counts, and a double for the nats on every kind of device.
        return float(scored.nll_sum), int(scored.num_targets), int(scored.num_correct), num_bytes


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class EvaluatePairs:
    """Scores held-out pairs; the figures do not depend on batch size or number of ranks.

    Memory does not grow with the set. Weights, modes and random states are untouched.

    Source: ``tests/training/evaluation/test_pair_evaluation.py``.
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

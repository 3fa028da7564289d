"""Held-out evaluation: loss, perplexity, bits per byte and accuracy of tokens, and the metrics of pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(kw_only=True)
class _HeldOutEvaluation:
    """Sums scores over held-out rows, which all processes take in turn.

    Memory does not grow with the set. Weights, modes and random states are untouched.

    Attributes:
        batch_size: Rows of a batch on each process.
        collate: Rows to a batch.
        progress: Shows how far the evaluation is.
        group: Processes that take rows in turn; ``None`` is all of them.
        sums_group: Processes whose sums together are those of all rows; ``None`` is all of them.
    """

    batch_size: int
    collate: Callable[[list[Mapping[str, Any]]], Batch]
    progress: TrainingProgress
    group: distributed.ProcessGroup | None = None
    sums_group: distributed.ProcessGroup | None = None

    def sum_scores(
        self, model: nn.Module, rows: Rows, what: str, score: Callable[[nn.Module, Batch], Mapping[str, Any]]
    ) -> dict[str, float]:
        """Return the sums over all rows of what ``score`` returns for a batch, by name; ``what`` names the work."""
        sums: dict[str, float] = {}
        num_rounds = count_rounds(len(rows), self.batch_size, self.group)
        with preserve_training_state(model):
            shares = share_rows(len(rows), self.batch_size, self.group)
            for numbers, is_counted in self.progress.track(shares, what, num_rounds):
                for name, value in score(model, self.collate([rows[number] for number in numbers])).items():
                    # Added up as Python numbers: exact counts, and a double for the nats on every kind of device.
                    sums[name] = sums.get(name, 0) + (value if is_counted else 0)
        names = sorted(sums)
        return dict(zip(names, sum_over_processes([sums[name] for name in names], self.sums_group), strict=True))


@dataclass(kw_only=True)
class EvaluateLoss(_HeldOutEvaluation):
    """Scores the held-out sets; the figures do not depend on batch size or number of ranks.

    All are means over target tokens: of whole sets, never of batch means; of all sets together, and where there are
    several, of each one as well. Bits per byte are all nats over
    ``ln 2`` times the bytes of the target tokens' text: terminators cost nats and have no bytes, so that an answer
    which does not end is paid for. The figure compares models of different vocabularies on the same text.

    Attributes:
        held_out: The held-out sets by name, whole and the same on every process.
        collate: Rows to a batch with ``labels``, unshifted, negative where there is no target.
        byte_lengths: Bytes of text of each id, ``int64 (V,)``, 0 for special tokens; ``None``: no bits per byte.

    Raises:
        DataError: A set has no rows.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_evaluation.py``.
    """

    held_out: Mapping[str, Rows]
    byte_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        for name, rows in self.held_out.items():
            if len(rows) == 0:
                raise DataError(Problem(name, "holds no row", "name another dataset_test_split"))

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return ``loss`` (nats per target), ``perplexity``, ``bits_per_byte``, ``token_accuracy``, and what it took.

        Where there are several sets, ``loss_NAME`` and ``bits_per_byte_NAME`` besides.

        Raises:
            DataError: No token of a held-out set is a target.
        """
        began = time.perf_counter()
        sums = {name: self._sum(model, name) for name in self.held_out}
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
        what = "evaluate" if len(self.held_out) == 1 else f"evaluate {name}"
        sums = _Sums(**self.sum_scores(model, self.held_out[name], what, self._score))
        if sums.num_targets == 0:
            raise DataError(Problem(name, "no token is a target", "see it with `recipes preview`"))
        return sums

    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        device = find_device(model)
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        scored = model(**{name: inputs[name] for name in inputs.keys() - {"num_tokens", "row_ids"}}, loss_head=True)
        num_bytes = 0
        if self.byte_lengths is not None:
            labels: Tensor = batch["labels"].cpu()
            num_bytes = int(self.byte_lengths[labels[labels >= 0]].sum())
        sums = _Sums(float(scored.nll_sum), int(scored.num_targets), int(scored.num_correct), num_bytes)
        return sums._asdict()


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(kw_only=True)
class EvaluatePairs(_HeldOutEvaluation):
    """Scores held-out pairs; the figures do not depend on batch size or number of ranks.

    Attributes:
        rows: The held-out pairs, whole and the same on every process.
        score: Scores a batch.

    Raises:
        DataError: There are none.

    Source: ``tests/training/evaluation/test_pair_evaluation.py``.
    """

    rows: Rows
    score: Callable[[nn.Module, Batch], PairScores]

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            raise DataError(Problem("the held-out set", "holds no pair", "name another dataset_test_split"))

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the mean over pairs of the loss and of every figure of the objective, and the error of accuracy."""
        began = time.perf_counter()
        totals = self.sum_scores(model, self.rows, "evaluate", self._sum)
        figures = {name: total / len(self.rows) for name, total in totals.items()}
        share = figures.get("rewards/accuracies")
        if share is not None:
            figures["rewards/accuracies_stderr"] = math.sqrt(share * (1 - share) / len(self.rows))
        return {**figures, "num_pairs": len(self.rows), "seconds": time.perf_counter() - began}

    def _sum(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        return {name: float(value) for name, value in self.score(model, batch).sums().items()}

"""Held-out evaluation: loss, perplexity, bits per byte and accuracy of tokens, and the metrics of pairs."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

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
    """Return the number of batches per process."""
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
        PreemptedError: A process received a stop request while training.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_evaluation.py``.
    """
    rank, world_size = get_rank(group), get_world_size(group)
    num_batches = math.ceil(num_rows / batch_size)
    # Every process makes the same number of turns, and so of collective calls.
    for index in range(rank, count_rounds(num_rows, batch_size, group) * world_size, world_size):
        stop_if_agreed()
        is_counted = index < num_batches
        start = index * batch_size if is_counted else 0
        yield range(start, min(start + batch_size, num_rows)), is_counted


Batch = dict[str, Any]
NUM_TARGETS: Final = "num_target_tokens"
"""The figure that is told of the run's own sets together alone."""


@dataclass(kw_only=True)
class _HeldOutEvaluation(ABC):
    """Sums scores over held-out rows, which all processes take in turn.

    Memory does not grow with the set. Weights, modes and random states are untouched.

    Attributes:
        batch_size: Rows of a batch on each process.
        collate: Rows to a batch.
        progress: Shows how far the evaluation is.
        held_out: The held-out sets by name, whole and the same on every process.
        named: Those of ``eval_datasets``, whose figures have their names alone.
        group: Processes that take rows in turn; ``None`` is all of them.
        sums_group: Processes whose sums together are those of all rows; ``None`` is all of them.

    Raises:
        DataError: A set has no rows.
    """

    batch_size: int
    collate: Callable[[list[Mapping[str, Any]]], Batch]
    progress: TrainingProgress
    held_out: Mapping[str, Rows]
    named: Collection[str] = ()
    group: distributed.ProcessGroup | None = None
    sums_group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, rows in self.held_out.items():
            if len(rows) == 0:
                raise DataError(Problem(name, "holds no row", "name another held-out set"))

    def name_work(self, name: str) -> str:
        """Return the progress label of a set."""
        return "evaluate" if len(self.held_out) == 1 else f"evaluate {name}"

    def find_own(self) -> list[str]:
        """Return the sets of the unnamed metrics: the run's own, or all if it has none."""
        return [name for name in self.held_out if name not in self.named] or list(self.held_out)

    def find_told(self) -> list[str]:
        """Return the sets with named metrics: those of ``eval_datasets``, and the run's own if several."""
        own = self.find_own()
        return [name for name in self.held_out if name in self.named or len(own) > 1]

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the figures of the unnamed metrics, of each named set the same as ``NAME_FIGURE``, and ``seconds``."""
        began = time.perf_counter()
        sums = {name: self.sum_scores(model, name) for name in self.held_out}
        own = [sums[name] for name in self.find_own()]
        figures = self.describe({name: sum(some[name] for some in own) for name in own[0]})
        for name in self.find_told():
            told = self.describe(sums[name])
            figures |= {f"{name}_{figure}": value for figure, value in told.items() if figure != NUM_TARGETS}
        return {**figures, "seconds": time.perf_counter() - began}

    @abstractmethod
    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of some rows from their sums."""

    @abstractmethod
    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        """Return the sums over a batch, by name."""

    def sum_scores(self, model: nn.Module, name: str) -> dict[str, float]:
        """Return the sums over all rows of a set, on all processes together, by name."""
        rows, sums = self.held_out[name], dict[str, float]()
        num_rounds = count_rounds(len(rows), self.batch_size, self.group)
        with preserve_training_state(model):
            shares = share_rows(len(rows), self.batch_size, self.group)
            for numbers, is_counted in self.progress.track(shares, self.name_work(name), num_rounds):
                scores = self._score(model, self.collate([rows[number] for number in numbers]))
                for figure, value in scores.items():
                    # Added up as Python numbers: exact counts, and a double for the nats on every kind of device.
                    sums[figure] = sums.get(figure, 0) + (value if is_counted else 0)
        # Sorted: processes add column by column, and their dictionaries need not have one order.
        names = sorted(sums)
        return dict(zip(names, sum_over_processes([sums[figure] for figure in names], self.sums_group), strict=True))


@dataclass(kw_only=True)
class EvaluateLoss(_HeldOutEvaluation):
    """Scores the held-out sets; the figures do not depend on batch size or number of ranks.

    All are means over target tokens: of whole sets, never of batch means; of the run's own sets together, and of each
    one by its name where there are several, as of each of ``eval_datasets``. Bits per byte are all nats over
    ``ln 2`` times the bytes of the target tokens' text: terminators cost nats and have no bytes, so that an answer
    which does not end is paid for. The figure compares models of different vocabularies on the same text.

    Attributes:
        collate: Rows to a batch with ``labels``, unshifted, negative where there is no target.
        byte_lengths: Bytes of text of each id, ``int64 (V,)``, 0 for special tokens; ``None``: no bits per byte.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_evaluation.py``.
    """

    byte_lengths: Tensor | None = None

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``loss`` (nats per target), ``perplexity``, ``token_accuracy``, and ``bits_per_byte`` if known."""
        loss = sums["nll"] / sums["num_targets"]
        in_bytes = {"bits_per_byte": sums["nll"] / math.log(2) / sums["num_bytes"]} if sums["num_bytes"] else {}
        accuracy = sums["num_correct"] / sums["num_targets"]
        figures = {"loss": loss, "perplexity": _exp(loss), "token_accuracy": accuracy, **in_bytes}
        return {**figures, NUM_TARGETS: sums["num_targets"]}

    def sum_scores(self, model: nn.Module, name: str) -> dict[str, float]:
        """Score one set, on all processes together.

        Raises:
            DataError: None of its tokens is a target.
        """
        sums = super().sum_scores(model, name)
        if sums["num_targets"] == 0:
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
        counts = {"num_targets": int(scored.num_targets), "num_correct": int(scored.num_correct)}
        return {"nll": float(scored.nll_sum), **counts, "num_bytes": num_bytes}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(kw_only=True)
class EvaluatePairs(_HeldOutEvaluation):
    """Scores held-out pairs; the figures do not depend on batch size or number of ranks.

    Attributes:
        score: Scores a batch.

    Source: ``tests/training/evaluation/test_pair_evaluation.py``.
    """

    score: Callable[[nn.Module, Batch], PairScores]

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean over pairs of the loss and of every figure of the objective, and the error of accuracy."""
        num_pairs = sums["num_pairs"]
        figures = {name: total / num_pairs for name, total in sums.items() if name != "num_pairs"}
        share = figures.get("rewards/accuracies")
        if share is not None:
            figures["rewards/accuracies_stderr"] = math.sqrt(share * (1 - share) / num_pairs)
        return {**figures, "num_pairs": num_pairs}

    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        scores = self.score(model, batch)
        return {name: float(value) for name, value in scores.sums().items()} | {"num_pairs": len(scores.losses)}

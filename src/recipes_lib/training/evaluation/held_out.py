"""Held-out evaluation: loss, perplexity, bits per byte and token accuracy, or the metrics of preference pairs."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from accelerate.utils import send_to_device
from torch import Tensor, nn

from recipes_lib.data.store import Rows
from recipes_lib.errors import DataError, Problem
from recipes_lib.models.inference import find_device, preserve_training_state
from recipes_lib.training.collectives import Group, get_rank, get_world_size, sum_over_processes
from recipes_lib.training.guards.preemption import stop_if_agreed
from recipes_lib.training.monitoring.metrics import read_together
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import PairScores


def share_rows(
    num_rows: int, batch_size: int, progress: TrainingProgress, label: str, group: Group = None
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the row indices of this process's batches, and whether the batch counts; every process must iterate.

    Batches are assigned to the ranks of ``group`` in turn. A rank without a batch in the last round repeats the first
    one uncounted, because a forward pass over sharded weights is collective. Before each batch all processes of the run
    agree whether to stop; groups have the same size, so all make the same number of these collective calls.

    Args:
        num_rows: Rows of the set.
        batch_size: Rows per batch and process.
        progress: Displays the batches of this process.
        label: Label of the display.
        group: Process group over which rows are divided; ``None``: all processes.

    Raises:
        PreemptedError: A process received a stop request while training.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_sharded.py``.
    """
    rank, world_size = get_rank(group), get_world_size(group)
    num_batches = math.ceil(num_rows / batch_size)
    # The same number of iterations on every rank.
    num_rounds = math.ceil(num_batches / world_size)
    for number in progress.track(range(num_rounds), label, num_rounds):
        stop_if_agreed()
        index = number * world_size + rank
        is_counted = index < num_batches
        start = index * batch_size if is_counted else 0
        yield range(start, min(start + batch_size, num_rows)), is_counted


Batch = dict[str, Any]
NUM_TARGETS: Final = "num_target_tokens"
"""Metric that is reported for the run's own sets together only, not by set."""


@dataclass(kw_only=True)
class _HeldOutEvaluation(ABC):
    """Evaluation hook that sums scores over held-out rows, divided over the processes.

    Memory use does not depend on the size of the set. Weights, modes and random states are preserved.

    Attributes:
        batch_size: Rows per batch and process.
        collate: Collator of rows.
        progress: Progress display.
        held_out: Held-out sets by name, complete and the same on every process.
        named: Names of the sets of ``eval_datasets``, which are reported by name only.
        group: Process group over which rows are divided; ``None``: all processes.
        sums_group: Process group over which sums are reduced; ``None``: all processes.

    Raises:
        DataError: A set has no rows.
    """

    batch_size: int
    collate: Callable[[list[Mapping[str, Any]]], Batch]
    progress: TrainingProgress
    held_out: Mapping[str, Rows]
    named: Collection[str] = ()
    group: Group = None
    sums_group: Group = None

    def __post_init__(self) -> None:
        for name, rows in self.held_out.items():
            if len(rows) == 0:
                raise DataError(Problem(name, "holds no row", "name another held-out set"))

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the joint metrics, separate ones as ``SET_METRIC``, and ``seconds``; every process must call."""
        began = time.perf_counter()
        sums = {name: self.sum_scores(model, name) for name in self.held_out}
        # Joint metrics are those of the run's own sets, or of all if it has none.
        own = [sums[name] for name in self.held_out if name not in self.named] or list(sums.values())
        metrics = self.describe({key: sum(each[key] for each in own) for key in own[0]})
        # Separate metrics are those of ``eval_datasets``, and of the run's own sets if there are several.
        for name in self.held_out:
            if name in self.named or len(own) > 1:
                separate = self.describe(sums[name]).items()
                metrics |= {f"{name}_{key}": value for key, value in separate if key != NUM_TARGETS}
        return {**metrics, "seconds": time.perf_counter() - began}

    @abstractmethod
    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return metrics computed from sums over rows."""

    @abstractmethod
    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float | Tensor]:
        """Return the sums over a batch by name: numbers, and scalars of one device."""

    def sum_scores(self, model: nn.Module, name: str) -> dict[str, float]:
        """Return the sums over all rows of a set, reduced over all processes; every process must call."""
        rows, sums = self.held_out[name], dict[str, float]()
        label = "evaluate" if len(self.held_out) == 1 else f"evaluate {name}"
        with preserve_training_state(model):
            for numbers, is_counted in share_rows(len(rows), self.batch_size, self.progress, label, self.group):
                scores = self._score(model, self.collate([rows[number] for number in numbers]))
                # Summed as Python numbers: counts are exact, and nats in double precision.
                for key, value in zip(scores, read_together([*scores.values()]), strict=True):
                    sums[key] = sums.get(key, 0) + (value if is_counted else 0)
        # Sorted, because the reduction is positional.
        keys = sorted(sums)
        return dict(zip(keys, sum_over_processes([sums[key] for key in keys], self.sums_group), strict=True))


@dataclass(kw_only=True)
class EvaluateLoss(_HeldOutEvaluation):
    """Computes loss metrics of the held-out sets, which do not depend on batch size or number of ranks.

    All are means over the target tokens of whole sets, never means of batch means. Bits per byte are the summed nats of
    the targets, divided by ``ln 2`` and by the bytes of their text. Terminators contribute nats but no bytes, so that
    predicting them poorly is penalised. Bits per byte are comparable between vocabularies on the same text.

    Attributes:
        collate: Collator of rows, with unshifted ``labels``, ``int64 (B, T)``, negative where there is no target.
        byte_lengths: Bytes of each token's text, ``int64 (V,)``, 0 for special tokens; ``None``: no bits per byte.

    Source: ``tests/training/evaluation/test_held_out.py``, ``tests/distributed/test_sharded.py``.
    """

    byte_lengths: Tensor | None = None

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``loss`` (nats per target), ``perplexity``, ``token_accuracy``, and ``bits_per_byte`` if known."""
        loss = sums["nll_sum"] / sums["num_targets"]
        in_bytes = {"bits_per_byte": sums["nll_sum"] / math.log(2) / sums["num_bytes"]} if sums["num_bytes"] else {}
        accuracy = sums["num_correct"] / sums["num_targets"]
        # The exponential of more than 709 overflows.
        perplexity = math.inf if loss > 700 else math.exp(loss)
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy, **in_bytes}
        return {**metrics, NUM_TARGETS: int(sums["num_targets"])}

    def sum_scores(self, model: nn.Module, name: str) -> dict[str, float]:
        """Return the sums over one set; as in the base class.

        Raises:
            DataError: The set has no target token.
        """
        sums = super().sum_scores(model, name)
        if sums["num_targets"] == 0:
            raise DataError(Problem(name, "no token is a target", "see it with `recipes preview`"))
        return sums

    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float | Tensor]:
        inputs = {name: batch[name] for name in batch.keys() - {"num_tokens", "row_ids"}}
        scored = model(**send_to_device(inputs, find_device(model)), loss_head=True)
        num_bytes = 0
        if self.byte_lengths is not None:
            labels: Tensor = batch["labels"].cpu()
            num_bytes = int(self.byte_lengths[labels[labels >= 0]].sum())
        sums = {name: getattr(scored, name) for name in ("nll_sum", "num_targets", "num_correct")}
        return {**sums, "num_bytes": num_bytes}


@dataclass(kw_only=True)
class EvaluatePairs(_HeldOutEvaluation):
    """Computes metrics of held-out pairs, which do not depend on batch size or number of ranks.

    Only the loss of ``aot`` and ``aot_unpaired`` depends on the batch size: it compares the pairs of a batch.

    Attributes:
        score: Scorer of a batch of pairs.

    Source: ``tests/training/evaluation/test_pair_evaluation.py``.
    """

    score: Callable[[nn.Module, Batch], PairScores]

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return means over pairs of the loss and the objective's metrics, and the standard error of accuracy.

        Pairs count as independent: with several pairs of a prompt, the true standard error is larger.
        """
        num_pairs = sums["num_pairs"]
        metrics = {name: total / num_pairs for name, total in sums.items() if name != "num_pairs"}
        accuracy = metrics["rewards/accuracies"]
        error = math.sqrt(accuracy * (1 - accuracy) / num_pairs)
        return {**metrics, "rewards/accuracies_stderr": error, "num_pairs": num_pairs}

    def _score(self, model: nn.Module, batch: Batch) -> Mapping[str, float | Tensor]:
        scores = self.score(model, batch)
        return {**scores.sums(), "num_pairs": len(scores.losses)}

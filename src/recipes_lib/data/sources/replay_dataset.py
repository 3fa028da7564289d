"""Replay of data of an earlier run, to reduce forgetting: its configuration, and the order of new and replayed rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from recipes_lib.config.schema import DataConfig, RecipeConfig
from recipes_lib.data.sources.mixtures import MAX_EPOCHS, REPEATED
from recipes_lib.data.sources.splits import IntArray
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import read_record, verify_fields

_OF_DATA: Final = {
    "dataset_name": str | None,
    "dataset_config": str | None,
    "dataset_revision": str | None,
    "dataset_train_split": str | None,
    "dataset_mixture": list | None,
    "dataset_format": str | None,
    "dataset_columns": dict | None,
    "test_split_size": int | float | None,
}
"""Keys in the record of a run that determine its training rows, and their types."""
_MAX_DENOMINATOR: Final = 1_000_000
"""Maximum denominator of ``replay_share``, so that its product with a number of tokens is exact in ``int64``."""
_OF_REPLAY: Final = 0x5EED
"""XORed into the seed for replayed rows, so that their permutations differ from those of the new rows."""


def find_replayed(config: RecipeConfig, max_length: int | None = None) -> RecipeConfig | None:
    """Return the configuration that prepares the replayed rows, or ``None`` without replay.

    Rows that the earlier run held out stay held out. The loss mask is that of the layout, or of the ``loss_on`` of the
    earlier run.

    Args:
        config: Configuration of the run.
        max_length: Maximum length of a row, in tokens; ``None`` for that of ``config``.

    Raises:
        DataError: The earlier run does not exist, or its ``run.json`` is damaged.
        ConfigError: The record of the earlier run names no dataset.
    """
    keys = config.forgetting
    if keys.replay_dataset is None and keys.replay_from is None:
        return None
    loss_on, training = None, dict(config.training)
    if keys.replay_from is None:
        data = DataConfig(dataset_name=keys.replay_dataset)
    else:
        path = Path(keys.replay_from) / "run.json"
        remedy = "name the output directory of a run, or write `replay_dataset: ...`"
        record = read_record(path, {"config": dict}, remedy=remedy)["config"]
        verify_fields(record, {**_OF_DATA, "loss_on": str | None, "seed": int | None}, str(path), remedy=remedy)
        data = DataConfig(**{name: record[name] for name in _OF_DATA if record.get(name) is not None})
        loss_on = record.get("loss_on")
        # The seed determines the held-out rows, and the rows that are drawn from the parts of a mixture.
        training["seed"] = record.get("seed")
        if data.dataset_name is None and data.dataset_mixture is None:
            where = config.locate("replay_from")
            raise ConfigError(Problem(where, "the run names no dataset", "write `replay_dataset: ...` instead"))
    tokens = dataclasses.replace(config.tokens, loss_on=loss_on, max_length=max_length or config.tokens.max_length)
    forgetting = dataclasses.replace(keys, replay_dataset=None, replay_from=None)
    return dataclasses.replace(config, data=data, tokens=tokens, training=training, forgetting=forgetting)


@dataclasses.dataclass(frozen=True, slots=True)
class EpochOrder:
    """Order without replay: every epoch is a permutation of all rows, determined by seed and epoch.

    Attributes:
        rows_per_epoch: Number of rows of the dataset.
        seed: Seed of the permutations; ``None`` keeps the order of the dataset.

    Source: accelerate ``SeedableRandomSampler``; ``tests/training/trainers/test_run_sampler.py``.
    """

    rows_per_epoch: int
    seed: int | None

    def locate(self, numbers: IntArray) -> IntArray:
        """Return the rows at positions of the run, counted over all epochs; ``int64 (K,)``."""
        epochs, places = np.divmod(numbers, self.rows_per_epoch)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._permute(epoch)[places[epochs == epoch]]
        return rows

    def _permute(self, epoch: int) -> IntArray:
        if self.seed is None:
            return np.arange(self.rows_per_epoch)
        import torch  # Slow to import, and not needed to inspect an existing set.

        generator = torch.Generator().manual_seed(self.seed + epoch)
        permutation: IntArray = torch.randperm(self.rows_per_epoch, generator=generator).numpy()
        return permutation


class ReplayOrder:
    """Order with replay: new rows as in ``EpochOrder``, with replayed rows in between.

    A replayed row is inserted whenever the replayed share of the loss terms falls below its target, so that in every
    prefix the share is exact up to one row. Rows are numbered over both datasets, new rows first. In both, every row is
    used once before any is repeated. An epoch is one pass over the new rows, and has the length of the first one.

    Source: ``tests/data/sources/test_replay_dataset.py``.
    """

    def __init__(self, terms: IntArray, replayed_terms: IntArray, share: float, *, seed: int | None) -> None:
        """Store the sizes; permutations are computed on demand.

        Args:
            terms: Number of terms of the loss's mean that each new row contributes, ``int64 (N,)``: its target tokens,
                or 1.
            replayed_terms: The same for the replayed rows, ``int64 (M,)``.
            share: Target share of replayed terms in all terms, in ``(0, 1)``.
            seed: Seed of the permutations; ``None`` keeps the order of the datasets.
        """
        self._terms, self._replayed_terms = terms, replayed_terms
        self._new = EpochOrder(len(terms), seed)
        self._replayed = EpochOrder(len(replayed_terms), None if seed is None else seed ^ _OF_REPLAY)
        # From the decimal text, so that 0.1 is one tenth instead of the nearest double.
        exact = Fraction(str(share)).limit_denominator(_MAX_DENOMINATOR)
        self._share, self._rest = exact.numerator, exact.denominator - exact.numerator
        self._total, self._replayed_total = int(terms.sum()), int(replayed_terms.sum())
        # A batch can span the end of a pass, so two passes are cached.
        self._merge_once = functools.lru_cache(maxsize=2)(self._merge)

    @property
    def rows_per_epoch(self) -> int:
        """Number of new rows plus the number of rows that are replayed in the first pass over them."""
        return self._new.rows_per_epoch + self._count_replayed(1)

    @property
    def replayed_per_epoch(self) -> float:
        """Mean number of passes over the replayed rows per epoch."""
        return self._count_replayed(1) / self._replayed.rows_per_epoch

    def locate(self, numbers: IntArray) -> IntArray:
        """Return the rows at positions of the run, ``int64 (K,)``; replayed rows are numbered after all new ones."""
        # Position in the run at which each pass over the new rows starts.
        starts = [0]
        while starts[-1] <= numbers.max(initial=0):
            starts.append(len(starts) * self._new.rows_per_epoch + self._count_replayed(len(starts)))
        passes = np.searchsorted(starts, numbers, side="right") - 1
        rows = np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            rows[chosen] = self._merge_once(number)[numbers[chosen] - starts[number]]
        return rows

    def _count_replayed(self, num_passes: int) -> int:
        """Return the number of replayed rows within the first ``num_passes`` passes over the new rows."""
        if num_passes == 0:
            return 0
        # Integer arithmetic: float rounding could move a row from one pass to the next.
        limit = -(-num_passes * self._total * self._share // self._rest)
        complete, rest = divmod(limit - 1, self._replayed_total)
        before = self._read_replayed(complete)
        return complete * self._replayed.rows_per_epoch + int(np.searchsorted(before, rest + 1))

    def _merge(self, number: int) -> IntArray:
        """Return the merged rows of one pass over the new rows, ``int64``."""
        size = self._replayed.rows_per_epoch
        new = self._new.locate(np.arange(number * len(self._terms), (number + 1) * len(self._terms)))
        reached = number * self._total + np.cumsum(self._terms[new])
        # Replayed rows of this pass, numbered over all passes over the replayed data.
        drawn = np.arange(self._count_replayed(number), self._count_replayed(number + 1))
        first, last = drawn[0] // size if len(drawn) else 0, drawn[-1] // size + 1 if len(drawn) else 0
        before = [passed * self._replayed_total + self._read_replayed(passed) for passed in range(first, last)]
        terms = np.concatenate([np.zeros(0, np.int64), *before])[drawn - first * size]
        # Each is inserted after the first new row with which the replayed share falls below its target.
        places = np.searchsorted(reached * self._share, terms * self._rest, side="right") + 1
        merged: IntArray = np.insert(new, places, self._replayed.locate(drawn) + len(new))
        return merged

    def _read_replayed(self, passed: int) -> IntArray:
        """Return the number of terms before each row within a pass over the replayed rows, ``int64 (M,)``."""
        size = self._replayed.rows_per_epoch
        terms = self._replayed_terms[self._replayed.locate(np.arange(passed * size, (passed + 1) * size))]
        return np.cumsum(terms) - terms


Order = EpochOrder | ReplayOrder
"""Order of the rows of a run: a map from positions in the run to rows of the dataset."""


def read_order_seed(config: RecipeConfig) -> int | None:
    """Return the seed of the order of rows in fine-tuning; ``None`` if they are not shuffled."""
    if config.read("train_sampling_strategy") == "sequential":
        return None
    seed: int = config.read("seed") if config.read("data_seed") is None else config.read("data_seed")
    return seed


def find_replay_warning(record: Mapping[str, Any]) -> list[str]:
    """Return a warning if replayed rows are repeated too often; ``record`` is ``PreparedRows.record``."""
    passes = record.get("replay", {}).get("passes_per_epoch", 0.0)
    return [f"replayed rows are read {passes:.1f} times an epoch; {REPEATED}"] if passes > MAX_EPOCHS else []

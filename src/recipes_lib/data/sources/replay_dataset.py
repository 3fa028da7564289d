"""Replay of earlier data: its rows, and their order among the new ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import DataConfig, RecipeConfig
from recipes_lib.data.sources.mixtures import MAX_EPOCHS
from recipes_lib.data.store import PreparedSet
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import read_record, verify_fields

IntArray = npt.NDArray[np.int64]

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
"""Keys of a run that say which rows it was trained on."""
_MAX_DENOMINATOR: Final = 1_000_000
"""Of a share, so that it times any number of tokens is an exact ``int64``."""
_OF_REPLAY: Final = 0x5EED
"""What the seed of the replayed rows' permutations differs by from that of the new ones."""


def find_replayed(config: RecipeConfig, max_length: int | None = None) -> RecipeConfig | None:
    """Return the configuration whose data are the replayed ones, or ``None`` without replay.

    Held-out rows of an earlier run stay held out. The loss mask of a row follows from its layout, or from the
    ``loss_on`` of the earlier run.

    Args:
        config: The run.
        max_length: Tokens that a row has room for; ``None``: as the run says.

    Raises:
        DataError: There is no such earlier run, or its record is not as it was written.
        ConfigError: It was trained on no data set.
    """
    keys = config.forgetting
    if keys.replay_dataset is None and keys.replay_from is None:
        return None
    loss_on, training = None, dict(config.training)
    if keys.replay_from is None:
        data = DataConfig(dataset_name=keys.replay_dataset)
    else:
        record = _read_keys(Path(expand_home(keys.replay_from)) / "run.json")
        data = DataConfig(**{name: record[name] for name in _OF_DATA if record.get(name) is not None})
        loss_on = record.get("loss_on")
        # It determines held-out rows and draws of a mixture.
        training["seed"] = record.get("seed")
        if data.dataset_name is None and data.dataset_mixture is None:
            where = config.provenance.get("replay_from", "replay_from")
            raise ConfigError(Problem(where, "that run names no dataset", "write `replay_dataset: ...` instead"))
    tokens = dataclasses.replace(config.tokens, loss_on=loss_on, max_length=max_length or config.tokens.max_length)
    forgetting = dataclasses.replace(keys, replay_dataset=None, replay_from=None)
    return dataclasses.replace(config, data=data, tokens=tokens, training=training, forgetting=forgetting)


def _read_keys(path: Path) -> Mapping[str, Any]:
    remedy = "name the output directory of a run, or write `replay_dataset: ...`"
    keys: dict[str, Any] = read_record(path, {"config": dict}, remedy=remedy)["config"]
    verify_fields(keys, {**_OF_DATA, "loss_on": str | None, "seed": int | None}, str(path), remedy=remedy)
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class EpochOrder:
    """All rows of the data in every epoch, each in another order: a permutation from seed and epoch.

    Attributes:
        num_rows: Rows of the data.
        seed: ``None`` takes the rows as they come.

    Source: accelerate ``SeedableRandomSampler``; ``tests/training/trainers/test_run_sampler.py``.
    """

    num_rows: int
    seed: int | None

    @property
    def rows_per_epoch(self) -> int:
        """Number of all rows."""
        return self.num_rows

    def locate(self, numbers: IntArray) -> IntArray:
        """Return the rows at these positions of the run, over concatenated epochs; ``int64 (K,)``."""
        epochs, places = np.divmod(numbers, self.num_rows)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._permute(epoch)[places[epochs == epoch]]
        return rows

    def _permute(self, epoch: int) -> IntArray:
        if self.seed is None:
            return np.arange(self.num_rows)
        import torch  # The import takes seconds, which an existing set does not need.

        generator = torch.Generator().manual_seed(self.seed + epoch)
        permutation: IntArray = torch.randperm(self.num_rows, generator=generator).numpy()
        return permutation


class ReplayOrder:
    """New rows in their order without replay, with replayed rows in between.

    A replayed row follows as soon as replayed rows have less than their share of the terms: in every prefix they differ
    from it by less than one row. Rows are numbered over both datasets, new ones first. In both, every row is used once
    before any is repeated. An epoch has as many rows as all new ones plus the replayed ones of the first pass.

    Source: ``tests/data/sources/test_replay_dataset.py``.
    """

    def __init__(self, terms: IntArray, replayed_terms: IntArray, share: float, *, seed: int | None) -> None:
        """Computes nothing yet.

        Args:
            terms: What each new row adds to the mean that the loss is, ``int64 (N,)``: its trained tokens, or 1.
            replayed_terms: The same of the replayed rows, ``int64 (M,)``.
            share: Of the terms that are replayed, above 0 and below 1.
            seed: As ``EpochOrder``'s.
        """
        self._terms, self._replayed_terms = terms, replayed_terms
        self._new = EpochOrder(len(terms), seed)
        self._replayed = EpochOrder(len(replayed_terms), None if seed is None else seed ^ _OF_REPLAY)
        # By its decimal text: 0.1 is one tenth, and not the nearest double.
        exact = Fraction(str(share)).limit_denominator(_MAX_DENOMINATOR)
        self._share, self._rest = exact.numerator, exact.denominator - exact.numerator
        self._total, self._replayed_total = int(terms.sum()), int(replayed_terms.sum())
        # The current pass of the run, and the next one.
        self._merge_once = functools.lru_cache(maxsize=2)(self._merge)

    @property
    def rows_per_epoch(self) -> int:
        """All new rows, plus the rows that are replayed in the first epoch."""
        return self._new.num_rows + self._count_replayed(1)

    @property
    def replayed_per_epoch(self) -> float:
        """Mean number of repetitions of each replayed row per epoch."""
        return self._count_replayed(1) / self._replayed.num_rows

    def locate(self, numbers: IntArray) -> IntArray:
        """As of ``EpochOrder``; replayed rows are numbered after all new ones."""
        starts = [0]
        while starts[-1] <= numbers.max(initial=0):
            starts.append(len(starts) * self._new.num_rows + self._count_replayed(len(starts)))
        passes = np.searchsorted(starts, numbers, side="right") - 1
        rows = np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            rows[chosen] = self._merge_once(number)[numbers[chosen] - starts[number]]
        return rows

    def _count_replayed(self, num_passes: int) -> int:
        """Number of replayed rows before that many complete passes over the new ones."""
        if num_passes == 0:
            return 0
        # In integers: rounding of a float could move a row from one pass to the next.
        limit = -(-num_passes * self._total * self._share // self._rest)
        complete, rest = divmod(limit - 1, self._replayed_total)
        before = self._read_replayed(complete)
        return complete * self._replayed.num_rows + int(np.searchsorted(before, rest + 1))

    def _merge(self, number: int) -> IntArray:
        """All rows of one pass over the new ones."""
        size = self._replayed.num_rows
        new = self._new.locate(np.arange(number * len(self._terms), (number + 1) * len(self._terms)))
        reached = number * self._total + np.cumsum(self._terms[new])
        drawn = np.arange(self._count_replayed(number), self._count_replayed(number + 1))
        first, last = drawn[0] // size if len(drawn) else 0, drawn[-1] // size + 1 if len(drawn) else 0
        before = [passed * self._replayed_total + self._read_replayed(passed) for passed in range(first, last)]
        terms = np.concatenate([np.zeros(0, np.int64), *before])[drawn - first * size]
        # After the first new row at which the replayed ones fall below their share of all terms.
        places = np.searchsorted(reached * self._share, terms * self._rest, side="right") + 1
        merged: IntArray = np.insert(new, places, self._replayed.locate(drawn) + len(new))
        return merged

    def _read_replayed(self, passed: int) -> IntArray:
        """Terms before each row of a pass over the replayed ones, within it."""
        size = self._replayed.num_rows
        terms = self._replayed_terms[self._replayed.locate(np.arange(passed * size, (passed + 1) * size))]
        return np.cumsum(terms) - terms


Order = EpochOrder | ReplayOrder
"""Order of rows: position in the run to row of the data."""


def build_order(config: RecipeConfig, terms: IntArray, replayed_terms: IntArray) -> ReplayOrder:
    """Return the order of a run; ``terms`` and ``replayed_terms`` as for ``ReplayOrder``."""
    data_seed = config.read("data_seed")
    seed = config.read("seed") if data_seed is None else data_seed
    is_shuffled = config.read("train_sampling_strategy") != "sequential"
    share = config.forgetting.replay_share
    return ReplayOrder(terms, replayed_terms, share, seed=seed if is_shuffled else None)


def describe_replay(config: RecipeConfig, order: ReplayOrder, replayed: PreparedSet) -> dict[str, Any]:
    """Return the record of replayed rows for ``run.json``, as JSON values."""
    return {
        "share": config.forgetting.replay_share,
        "rows_per_epoch": order.rows_per_epoch,
        "passes_per_epoch": order.replayed_per_epoch,
        "prepared_set": str(replayed.path),
        "train": replayed.manifest["train"],
    }


def tell_replay(record: Mapping[str, Any]) -> list[str]:
    """Return a warning if replayed rows are repeated too often; ``record`` is that of the data."""
    passes = record.get("replay", {}).get("passes_per_epoch", 0.0)
    if passes <= MAX_EPOCHS:
        return []
    return [f"replayed rows are read {passes:.1f} times an epoch; beyond {MAX_EPOCHS} a repeated token teaches little"]

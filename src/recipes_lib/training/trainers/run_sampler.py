"""Row order of a run: permutation by epoch without skipped rows, and even shards of its batches for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, Sampler

from recipes_lib.data.tokens.dataset import RowSkips


@dataclass(frozen=True, slots=True)
class EpochRows:
    """Which rows of the run every step of it takes, the epochs laid end to end.

    Attributes:
        num_rows: Rows of an epoch.
        steps_per_epoch: Its steps, the last of which takes what is left.
        rows_per_step: Rows of any other.

    Source: transformers ``Trainer._run_epoch``, accelerate ``BatchSamplerShard``;
    ``tests/training/trainers/test_run_sampler.py``.
    """

    num_rows: int
    steps_per_epoch: int
    rows_per_step: int

    def find(self, step: int) -> tuple[int, int]:
        """Return the first row of step ``step`` of the run, from 0, and the first behind it."""
        epoch, at = divmod(step, self.steps_per_epoch)
        stop = self.num_rows if at + 1 == self.steps_per_epoch else (at + 1) * self.rows_per_step
        return epoch * self.num_rows + at * self.rows_per_step, epoch * self.num_rows + stop


class RunSampler(Sampler[int]):
    """Yields the rows of an epoch of the run, on every process all of them.

    Without skips it is the order that upstream's trainer takes: a permutation drawn from the seed and the epoch.
    Rows that are left out are replaced by those that follow, at the end of an epoch by the first of the next one.

    Source: accelerate ``SeedableRandomSampler``; ``tests/training/trainers/test_run_sampler.py``.
    """

    def __init__(self, num_rows: int, *, seed: int | None, skips: RowSkips, read_epoch: Callable[[], int]) -> None:
        """Prepare the order.

        Args:
            num_rows: Rows of the data.
            seed: Of the permutations; ``None`` takes the rows as they come.
            skips: What is left out.
            read_epoch: Says which epoch begins, whenever one does.
        """
        self._num_rows = num_rows
        self._seed = seed
        self._skips = skips
        self._read_epoch = read_epoch

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[int]:
        first = self._read_epoch() * self._num_rows
        natural = self._skips.locate(np.arange(first, first + self._num_rows))
        epochs, places = np.divmod(natural, self._num_rows)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._permute(epoch)[places[epochs == epoch]]
        yield from rows.tolist()

    def _permute(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if self._seed is None:
            return np.arange(self._num_rows)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        permutation: np.ndarray[tuple[int], np.dtype[np.int64]] = torch.randperm(
            self._num_rows, generator=generator
        ).numpy()
        return permutation


class EvenBatches(BatchSampler):
    """Batches, the last one over and over until there are as many for each taker as for any other."""

    def __init__(self, batches: BatchSampler, num_takers: int) -> None:
        """Repeat the last of ``batches``, unless those that not all of ``num_takers`` could have are dropped."""
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self._batches = batches
        self.num_repeats = 0 if batches.drop_last else -len(batches) % num_takers

    def __len__(self) -> int:
        return len(self._batches) + self.num_repeats

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for batch in self._batches:
            yield batch
        for _ in range(self.num_repeats):
            yield batch


def shard_evenly(shard: BatchSamplerShard, num_takers: int, taker: int) -> bool:
    """Deal the batches of an epoch out in turns, so that all takers have the same number of them.

    accelerate would have the last ones filled up with the first rows of the epoch, which would count twice; and of
    takers that are several processes it knows nothing.

    Args:
        shard: As accelerate has made it, of all batches; changed in place.
        num_takers: Processes, or groups of them, that take batches of their own.
        taker: Which of them this is.

    Returns:
        Whether this one's last batch is a repeated one, which must not count.

    Source: ``tests/training/trainers/test_run_sampler.py``.
    """
    batches = EvenBatches(shard.batch_sampler, num_takers)
    shard.batch_sampler, shard.even_batches = batches, False
    shard.num_processes, shard.process_index = num_takers, taker
    return taker >= num_takers - batches.num_repeats

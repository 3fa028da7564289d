"""Row order of a run without skipped rows, epoch by epoch, and even shards of its batches for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, Sampler

from recipes_lib.data.sources.replay import Order
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

    Without skips they come in their order. Rows that are left out are replaced by those that follow, at the end of an
    epoch by the first of the next one.

    Source: ``tests/training/trainers/test_run_sampler.py``.
    """

    def __init__(self, order: Order, *, skips: RowSkips, read_epoch: Callable[[], int]) -> None:
        """Take the rows in ``order`` without ``skips``; ``read_epoch`` says which epoch begins, whenever one does."""
        self._order = order
        self._skips = skips
        self._read_epoch = read_epoch

    def __len__(self) -> int:
        return self._order.rows_per_epoch

    def __iter__(self) -> Iterator[int]:
        first = self._read_epoch() * len(self)
        natural = self._skips.locate(np.arange(first, first + len(self)))
        yield from self._order.locate(natural).tolist()


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

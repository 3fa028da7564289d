"""Held-out rows over the processes of a run: each takes every n-th batch, and all take the same number of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import distributed

from recipes_lib.training.collectives import get_rank, get_world_size
from recipes_lib.training.guards.preemption import stop_if_agreed


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

    Source: ``tests/training/evaluation/test_row_sharing.py``, ``tests/distributed/test_evaluation.py``.
    """
    rank, world_size = get_rank(group), get_world_size(group)
    num_batches = math.ceil(num_rows / batch_size)
    for index in range(rank, count_rounds(num_rows, batch_size, group) * world_size, world_size):
        stop_if_agreed()
        is_counted = index < num_batches
        start = index * batch_size if is_counted else 0
        yield range(start, min(start + batch_size, num_rows)), is_counted

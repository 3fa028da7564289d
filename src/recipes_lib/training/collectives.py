"""Collective operations on Python objects, and ranks; all work without a process group, as for one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
from accelerate import PartialState
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from recipes_lib.errors import LostPeerError, UserError
from recipes_lib.processes import explain_lost_connection
from recipes_lib.stopping import StopPendingError

T = TypeVar("T")
Group = distributed.ProcessGroup | None
_CALLS: Final = itertools.count()
"""Numbers the calls of ``is_true_on_main`` of this process, which are equally many on all ranks."""


def is_distributed() -> bool:
    """Return whether there is a process group; a single process has none."""
    return distributed.is_initialized()


def destroy_groups() -> None:
    """Destroy all process groups; waits for unfinished collectives of NCCL, so not for use after a failure."""
    if is_distributed():
        distributed.destroy_process_group()


def get_rank(group: Group = None) -> int:
    """Return the rank of this process in ``group`` (default: all processes), 0 without one."""
    return distributed.get_rank(group) if is_distributed() else 0


def get_world_size(group: Group = None) -> int:
    """Return the number of processes of ``group`` (default: all), 1 without one."""
    return distributed.get_world_size(group) if is_distributed() else 1


def new_host_group() -> Group:
    """Create a gloo group of all ranks, whose collectives may take a year; all ranks must call.

    For a background thread: NCCL collectives of two threads could be enqueued in a different order on each rank, and
    would block each other. And for work of one rank, such as on a slow disk, that takes longer than ``ddp_timeout``.
    """
    return distributed.new_group(backend="gloo", timeout=timedelta(weeks=52)) if is_distributed() else None


def gather_objects(value: T, group: Group = None) -> list[T]:
    """Return the values of all ranks in rank order; all ranks of ``group`` must call."""
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * get_world_size(group)
    distributed.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T, group: Group = None, source: int = 0) -> T:
    """Return the value of rank ``source`` of ``group``; all ranks of ``group`` must call."""
    shared: list[Any] = [value]
    if is_distributed():
        distributed.broadcast_object_list(shared, group=group, group_src=source)
    received: T = shared[0]
    return received


def is_true_on_main(value: bool) -> bool:
    """Return the value of rank 0, by the launcher's store if there is no process group yet; all ranks must call.

    Raises:
        LostPeerError: The launcher of rank 0 has ended, or rank 0 does not call within 30 minutes, torch's timeout.
    """
    if is_distributed():
        return broadcast_object(value)
    try:
        store, rank, _ = next(rendezvous("env://"))
        # With one key for all calls, a rank could read the value of an earlier one.
        key = f"recipes_lib/is_true_on_main/{next(_CALLS)}"
        if rank == 0:
            store.set(key, str(value))
        return bool(store.get(key).decode() == str(True))
    except RuntimeError as error:  # The errors of the store.
        raise LostPeerError(explain_lost_connection(error) or f"the store of the launcher failed: {error}") from error


@functools.cache
def _open_host_group(_world: Group) -> Group:
    """Return the host group of a default group, created once."""
    return new_host_group()


def compute_on_main(compute: Callable[[], T]) -> T:
    """Return what ``compute`` returns on rank 0, which may take longer than ``ddp_timeout``; all ranks must call.

    Raises:
        UserError: Rank 0 raised it; every rank raises it, so that none waits in a later collective.
        StopPendingError: As ``UserError``.
    """
    # Before rank 0 is busy, because all ranks create it together.
    group = _open_host_group(distributed.group.WORLD)
    found: T | UserError | StopPendingError | None = None
    if get_rank() == 0:
        try:
            found = compute()
        except (UserError, StopPendingError) as error:
            found = error
    shared = broadcast_object(found, group)
    if isinstance(shared, UserError | StopPendingError):
        raise shared
    return cast("T", shared)


def sum_over_processes(values: Sequence[float], group: Group = None) -> list[float]:
    """Return the elementwise sum of ``values`` over ranks, exact for integers; all ranks of ``group`` must call."""
    return [sum(column) for column in zip(*gather_objects(list(values), group), strict=True)]


def is_any(value: bool) -> bool:
    """Return whether ``value`` is true on any rank, by one all-reduce; all ranks must call."""
    if not is_distributed():
        return value
    return bool(sum_tensor(torch.tensor(int(value), device=PartialState().device)))


def sum_tensor(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks in place and return it; all ranks must call."""
    if is_distributed():
        distributed.all_reduce(tensor)
    return tensor

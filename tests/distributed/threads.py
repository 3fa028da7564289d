"""Collective operations over threads of one process, for tests of communication alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, distributed


def run_together(tasks: Sequence[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run each task in its own thread, as the rank of its index, and return the results.

    Replaces all-reduce, all-gather, reduce-scatter and all-to-all of ``torch.distributed`` by exchanges of threads.
    """
    barrier, given, own = threading.Barrier(len(tasks), timeout=60), {}, threading.local()
    total = distributed.ReduceOp.SUM
    kinds = {total: torch.sum, distributed.ReduceOp.MAX: torch.amax, distributed.ReduceOp.MIN: torch.amin}

    def exchange(tensor: Tensor) -> list[Tensor]:
        given[own.rank] = tensor.detach().clone()
        barrier.wait()
        tensors = [given[rank] for rank in range(len(tasks))]
        barrier.wait()
        return tensors

    def all_reduce(tensor: Tensor, op: Any = total, group: Any = None) -> None:
        tensor.copy_(kinds[op](torch.stack(exchange(tensor)), dim=0))

    def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None) -> None:
        output.copy_(torch.cat(exchange(tensor)))

    def reduce_scatter_tensor(output: Tensor, tensor: Tensor, group: Any = None) -> None:
        output.copy_(torch.stack(exchange(tensor)).sum(dim=0).chunk(len(tasks))[own.rank])

    def all_to_all_single(output: Tensor, tensor: Tensor, group: Any = None) -> None:
        output.copy_(torch.cat([theirs.chunk(len(tasks))[own.rank] for theirs in exchange(tensor)]))

    def run(rank: int) -> Any:
        own.rank = rank
        return tasks[rank]()

    for fake in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
        monkeypatch.setattr(distributed, fake.__name__, fake)
    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, range(len(tasks))))

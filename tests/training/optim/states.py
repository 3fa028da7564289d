"""Bytes of optimizer states, for tests and the benchmark of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def measure_state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter] | None = None) -> float:
    """Return this rank's bytes of state per trained parameter; 0 before the first step.

    Tensors that several parameters share, such as the levels of a quantisation, count once.
    """
    if parameters is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [tensor for parameter in parameters for tensor in _iter_tensors(optimizer.state.get(parameter))]
    num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in states}.values())
    return num_bytes / sum(tensor.numel() for parameter in parameters for tensor in _iter_tensors(parameter))


def measure_group_bytes(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return ``measure_state_bytes`` of each group that is not empty."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [measure_state_bytes(optimizer, parameters) for parameters in groups if parameters]


def _iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that take memory: shards of sharded tensors, codes and scales of quantised ones."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        yield from _iter_tensors([getattr(value, name) for name in names])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _iter_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_tensors(item)

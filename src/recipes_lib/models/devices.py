"""The device and the inner model of a possibly offloaded, adapted or wrapped model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.tensor import DTensor


def unwrap_adapter(model: Any) -> Any:
    """Return the model inside a PEFT wrapper, its layers still under their adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on: what it is given and what it returns lie there.

    Weights that FSDP2 offloads wait on the host; the mesh that shares them out says where they are gathered.

    Source: torch ``CPUOffloadPolicy``; ``tests/models/test_devices.py``.
    """
    weight = next(model.parameters())
    if not isinstance(weight, DTensor) or weight.device_mesh.device_type == weight.device.type:
        return weight.device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


@contextmanager
def inputs_moved_to_device(model: Any) -> Iterator[None]:
    """Have a model whose weights wait elsewhere bring what it is given to where it computes.

    ``generate`` brings it to where the weights are. FSDP2 brings it back before the outermost call alone, and that is
    ``generate`` itself.

    Args:
        model: Of transformers or PEFT; where it computes where its weights are there is nothing to do.

    Source: ``tests/distributed/test_simulated_device.py``.
    """
    device = find_device(model)
    if model.device == device:
        yield
        return

    def bring(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, device), send_to_device(kwargs, device)

    inner = unwrap_adapter(model)
    handle = inner.register_forward_pre_hook(bring, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

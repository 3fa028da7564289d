"""Where a model computes, which need not be where its weights wait."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


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

"""A model computes where its weights are, or where they will be gathered."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from recipes_lib.models.devices import find_device


def test_whole_weights_compute_where_they_are() -> None:
    assert find_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert find_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_weights_that_wait_on_the_host_compute_on_their_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 leaves them with offload: a shard on the CPU of a mesh of GPUs, of which this process has the fourth."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    model = nn.Linear(2, 2)
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size([2, 2]), (2, 1), torch.float32))
    model.weight = nn.Parameter(DTensor(torch.ones(2, 2), spec, requires_grad=False))
    assert model.weight.to_local().device.type == "cpu"
    assert find_device(model) == torch.device("cuda", 3)

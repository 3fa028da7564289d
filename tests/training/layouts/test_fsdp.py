"""Precision of what is sharded, on objects without processes; sharding itself is in ``tests/distributed``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes_lib.training.layouts.fsdp import (
    compute_total_norm,
    gathered,
    prepare_frozen,
    reshard,
    settle_precision,
)


def build_accelerator(policy: MixedPrecisionPolicy | None, *, is_fsdp2: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_fsdp2=is_fsdp2, state=SimpleNamespace(fsdp_plugin=SimpleNamespace(mixed_precision_policy=policy))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_products_are_narrow(dtype):
    accelerator = build_accelerator(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype))
    settle_precision(accelerator)
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (dtype, torch.float32, torch.float32)


def test_full_precision_stays_what_it_is():
    accelerator = build_accelerator(None)
    settle_precision(accelerator)
    assert accelerator.state.fsdp_plugin.mixed_precision_policy is None


def test_without_fsdp_there_is_nothing_to_settle():
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    accelerator = build_accelerator(narrow, is_fsdp2=False)
    settle_precision(accelerator)
    assert accelerator.state.fsdp_plugin.mixed_precision_policy is narrow


def test_a_frozen_model_is_not_kept_for_checkpoints():
    models: list[nn.Module] = []

    def prepare_model(model: nn.Module, **_: bool) -> nn.Module:
        models.append(model)
        return model

    accelerator = SimpleNamespace(is_fsdp2=False, prepare_model=prepare_model, _models=models)
    model = nn.Linear(2, 2)
    assert prepare_frozen(accelerator, model) is model
    assert not models


def test_what_is_not_sharded_stays_whole():
    model = nn.Linear(2, 2)
    reshard(model)
    assert model.weight.shape == (2, 2)


def test_what_is_not_sharded_is_there_already():
    model = nn.Linear(2, 2)
    with gathered(model):
        assert model.weight.shape == (2, 2)


def test_the_norm_is_that_of_all_tensors_together():
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4), torch.randn(5)]
    assert float(compute_total_norm(tensors)) == pytest.approx(float(torch.cat([t.flatten() for t in tensors]).norm()))


def test_the_norm_counts_a_part_that_another_process_has():
    """Of two processes one is not there: what it would add to a sum is left out, but the number of its own counts."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        cut, plain = distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)], src_data_rank=None), torch.tensor([3.0])
        # 2, 2 of this process, and 3.
        assert float(compute_total_norm([cut, plain])) == pytest.approx(17**0.5)
    finally:
        distributed.destroy_process_group()

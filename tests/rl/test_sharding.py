"""Sharded models of PPO on one process: placement, gathering, stop requests."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from tests.distributed import sharding as recipes
from tests.rl import keys_task
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError, PreemptedError
from recipes_lib.rl import models as sharding
from recipes_lib.rl.models import beat_between, choose_placement, gathered_weights
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.layouts.fsdp import is_sharded
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers.arguments import build_training_arguments


@pytest.fixture
def configure(tmp_path):
    def build(**keys):
        return load_config("ppo", keys_task.build_flags(tmp_path, tmp_path / "out", tmp_path, **keys))

    return build


@pytest.fixture
def sharded():
    """Two linear layers, sharded by FSDP2 over one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        for module in (*model, model):
            fully_shard(module, mesh=distributed.init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 3))
        yield model
    finally:
        distributed.destroy_process_group()


def test_deepspeed_launch_raises_before_loading(tmp_path, capsys):
    keys = {"model_name_or_path": "nowhere", "dataset_name": "nothing", "output_dir": tmp_path / "out"}
    keys["reward_funcs"] = "[nothing:at_all]"
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}):
        assert recipes.run_recipe("ppo", keys) == 2
    printed = capsys.readouterr().err
    assert "recipes/ppo.py and a launch with DeepSpeed: DeepSpeed supports one model; these recipes" in printed
    assert "accelerate_configs/fsdp2.yaml" in printed
    assert not (tmp_path / "out").exists()


def test_fsdp_launch_that_accelerate_ignores_raises(configure, tmp_path):
    """accelerate silently replaces FSDP by DDP on CPUs."""
    args = build_training_arguments(configure(), Launch(0, 0, 1, ""), has_eval=True)
    model = nn.Linear(2, 2)
    assert choose_placement(args, Launch(0, 0, 1, ""))(model) is model
    assert not is_sharded(model)
    with pytest.raises(ConfigError, match="FSDP was launched and accelerate is running"):
        choose_placement(args, Launch(0, 0, 1, "FSDP"))


def test_weights_are_gathered_inside_context_only(sharded):
    expected = sharded(torch.ones(1, 3))
    with gathered_weights(sharded):
        assert not any(hasattr(parameter, "device_mesh") for parameter in sharded.parameters())
        for _ in range(2):
            torch.testing.assert_close(sharded(torch.ones(1, 3)), expected)
            assert not any(hasattr(parameter, "device_mesh") for parameter in sharded.parameters())
    assert all(hasattr(parameter, "device_mesh") for parameter in sharded.parameters())
    # Layers are resharded after a forward pass again.
    sharded(torch.ones(1, 3))
    assert hasattr(sharded[0].weight, "device_mesh")


def test_ranks_agree_on_stop_at_end_of_gathered_context(sharded, monkeypatch):
    collectives = []
    monkeypatch.setattr(sharding, "stop_if_agreed", lambda: collectives.append(1))
    with pytest.raises(StopPendingError), gathered_weights(sharded):
        raise StopPendingError
    assert collectives == []
    with gathered_weights(sharded):
        pass
    with gathered_weights(nn.Linear(2, 2)), gathered_weights(None):
        pass
    assert collectives == [1]


def test_stop_request_is_local_if_replicated_and_collective_if_sharded(sharded, monkeypatch):
    monkeypatch.setattr(STOP, "reason", "SIGTERM")
    with pytest.raises(StopPendingError), STOP.deferred():
        beat_between(nn.Linear(2, 2))
    with pytest.raises(PreemptedError), STOP.deferred():
        beat_between(sharded)

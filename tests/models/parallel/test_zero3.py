"""Gathering of ZeRO-3 weights around calls, with a stand-in; ``tests/distributed/test_zero.py`` runs DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import deepspeed as integration

from recipes_lib.models.parallel.zero3 import (
    gathered_for_writing,
    register_gather_hooks,
    remove_gather_hooks,
    zero3_init_disabled,
)


class ShardedParameter:
    """What DeepSpeed adds to a weight: it is empty until it is gathered."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight, self.whole = weight, weight.data
        weight.ds_id, weight.all_gather, weight.partition = 0, self.gather, self.let_go  # type: ignore[attr-defined]
        weight.data = torch.empty(0)

    def gather(self, param_list: Any = None) -> None:
        self.weight.data = self.whole

    def let_go(self, param_list: Any = None, has_been_updated: bool = False) -> None:
        assert has_been_updated == (param_list is None), "what is not written need not be sent"
        self.weight.data = torch.empty(0)


def test_weight_is_gathered_during_call_and_released_after() -> None:
    linear = nn.Linear(2, 2, bias=False)
    expected = linear(torch.ones(2))
    ShardedParameter(linear.weight)
    model = nn.Sequential(linear, nn.ReLU())
    with pytest.raises(RuntimeError):
        linear(torch.ones(2))
    register_gather_hooks(model)
    assert not model._forward_pre_hooks, "a container would gather the weights of all its modules at once"
    assert torch.equal(linear(torch.ones(2)), expected)
    assert linear.weight.numel() == 0
    remove_gather_hooks(model)
    with pytest.raises(RuntimeError):
        linear(torch.ones(2))


class ReadsConvolution(nn.Module):
    """A layer that reads the weight of a module without calling it, as Mamba and linear attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.convolution.weight.sum()


def test_weight_that_layer_reads_without_call_is_gathered() -> None:
    layers = nn.ModuleList([ReadsConvolution()])
    expected = layers[0](torch.ones(2))
    weight = layers[0].convolution.weight
    ShardedParameter(weight)
    register_gather_hooks(nn.ModuleDict({"layers": layers}))
    assert torch.equal(layers[0](torch.ones(2)), expected)
    assert weight.numel() == 0


def test_unsharded_model_is_left_unchanged() -> None:
    model = nn.Linear(2, 2)
    register_gather_hooks(model)
    assert not model._forward_pre_hooks
    with torch.no_grad(), gathered_for_writing(model.weight):
        model.weight.fill_(3.0)
    assert model.weight.eq(3).all()


def test_modified_weights_are_partitioned_again() -> None:
    weight = nn.Parameter(torch.zeros(3))
    share = ShardedParameter(weight)
    with torch.no_grad(), gathered_for_writing(weight):
        weight.fill_(3.0)
    assert share.whole.eq(3).all()
    assert weight.numel() == 0


def test_transformers_zero3_init_is_disabled_in_context(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zero3Config:
        def is_zero3(self) -> bool:
            return True

    config = Zero3Config()
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", lambda: config)
    with zero3_init_disabled():
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", None)
    with zero3_init_disabled():
        pass
    assert integration._hf_deepspeed_config_weak_ref is None

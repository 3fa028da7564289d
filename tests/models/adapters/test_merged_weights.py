"""Streaming of merged weights (``iterate_weights``): checkpoint names, logits, and an unchanged adapted model."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.adapter_models import build_model, compute_logits

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.saved import iterate_weights


def adapt(model, **options):
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4, **options), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_model_loaded_from_merged_weights_has_logits_of_adapted_model(options):
    other, adapted = build_model("llama"), adapt(build_model("llama"), **options)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    loaded = other.load_state_dict(dict(iterate_weights(adapted)))
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    expected = compute_logits(adapted)
    torch.testing.assert_close(compute_logits(other), expected, rtol=0, atol=1e-4)
    with adapted.disable_adapter():
        assert not torch.allclose(expected, compute_logits(adapted), atol=1e-3)
    # The base is also the reference model, so it must not change.
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_merged_weights_are_yielded_once_and_can_be_filtered_by_name(kind, is_adapted):
    model = build_model(kind)
    expected = [(name, value.shape) for name, value in model.named_parameters()]
    streamed = adapt(copy.deepcopy(model)) if is_adapted else model
    assert [(name, tensor.shape) for name, tensor in iterate_weights(streamed)] == expected
    assert [name for name, _ in iterate_weights(streamed, {"model.norm.weight"})] == ["model.norm.weight"]


def test_trainable_tokens_are_refused_by_merging():
    settings = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ValueError, match="fully trained modules or tokens"):
        dict(iterate_weights(get_peft_model(build_model("llama"), settings)))

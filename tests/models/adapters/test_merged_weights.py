"""Weights for another program: those of the model as it answers, under its checkpoint's names, and no trace left."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.saved import iterate_weights

IDS = torch.arange(1, 9)[None]


def build_model(tied: bool = False):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)).eval()


def adapt(model, **options):
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4, **options), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_another_model_with_them_answers_as_the_adapted_one(options):
    other, adapted = build_model(), adapt(build_model(), **options)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    loaded = other.load_state_dict(dict(iterate_weights(adapted)))
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        torch.testing.assert_close(other(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(expected, adapted(input_ids=IDS).logits, atol=1e-3)
    # The trunk is a reference too: not a bit of it may move.
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_each_comes_once_under_its_own_name_or_only_those_that_are_wanted(tied, is_adapted):
    model = build_model(tied)
    expected = [(name, value.shape) for name, value in model.named_parameters()]
    given = adapt(copy.deepcopy(model)) if is_adapted else model
    assert [(name, tensor.shape) for name, tensor in iterate_weights(given)] == expected
    assert [name for name, _ in iterate_weights(given, {"model.norm.weight"})] == ["model.norm.weight"]

"""Preallocated key-value cache against transformers' ``DynamicCache``."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)
from transformers.cache_utils import DynamicLayer

from recipes_lib.models.generation import PreallocatedLayer, build_cache

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def draw(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(rows, 2, tokens, 4, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("num_tokens", [4, 9, 40])
def test_cache_equals_dynamic_cache_after_growth_and_row_removal(num_tokens):
    layers = [PreallocatedLayer(num_tokens), DynamicLayer()]
    for rows, tokens in ((3, 5), (3, 1), (3, 1)):
        keys, values = draw(rows, tokens), -draw(rows, tokens)
        found, expected = (layer.update(keys, values) for layer in layers)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
    for layer in layers:
        layer.batch_select_indices(torch.tensor([2, 0]))
    for tokens in (1, 2):
        found, expected = (layer.update(draw(2, tokens), draw(2, tokens)) for layer in layers)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_cache_appends_token_in_place():
    layer = PreallocatedLayer(9)
    before, _ = layer.update(draw(2, 4), draw(2, 4))
    after, _ = layer.update(draw(2, 1), draw(2, 1))
    assert before.data_ptr() == after.data_ptr()


def test_cache_is_not_used_for_sliding_window_recurrent_state_and_model_without_cache():
    whole = build_cache(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)), 8)
    assert whole is not None
    assert [type(layer) for layer in whole.layers] == [PreallocatedLayer] * 2
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
    mixed = build_cache(Gemma2ForCausalLM(Gemma2Config(**SIZES, **heads)), 8)
    assert mixed is not None
    assert sum(isinstance(layer, PreallocatedLayer) for layer in mixed.layers) == 1
    assert build_cache(MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2)), 8) is None
    hybrid = Lfm2Config(**SIZES, num_attention_heads=2, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    assert build_cache(Lfm2ForCausalLM(hybrid), 8) is None
    # Subclasses of the layers of keys and values, whose further states no selection of rows reaches.
    states = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
    parallel = FalconH1Config(**SIZES, **states, num_attention_heads=2, num_key_value_heads=2)
    assert build_cache(FalconH1ForCausalLM(parallel), 8) is None
    compressed = DeepseekV4Config(**SIZES, num_attention_heads=2, head_dim=16, n_routed_experts=4, o_groups=2)
    with torch.device("meta"):
        assert build_cache(DeepseekV4ForCausalLM(compressed), 8) is None
    assert build_cache(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=40, n_embd=32, n_layer=2, n_head=2)), 8) is None

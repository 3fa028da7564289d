"""FLOPs per token and step, compared with ``torch.utils.flop_counter``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.vision_models import build_gemma3
from tests.planning.runs import build_config
from tests.tiny import sizes
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from recipes_lib.planning.compute import compute_flops_per_token, count_attended, count_step

BATCH, LENGTH = 2, 48
SMALL = sizes(64, 3, 4, vocab_size=160, intermediate_size=96, num_key_value_heads=2)
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
CONFIGS = {
    "grouped_queries": LlamaConfig(**SMALL),
    "tied_head": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "separate_head_dim": Qwen3Config(**SMALL, head_dim=32),
    "gpt2_biases_conv1d_learned_positions": GPT2Config(vocab_size=160, n_embd=64, n_layer=3, n_head=4),
    "experts": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "experts with biases": GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=2 * LENGTH
    ),
    "experts_in_every_second_layer": Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=2
    ),
    "latent_attention_shared_expert": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **MLA, n_routed_experts=8, num_experts_per_tok=2
    ),
    # The last layer is global; per-layer embeddings off, because a frozen model needs token ids for them.
    "wider heads in global layers": Gemma4TextConfig(
        **SMALL,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=2 * LENGTH,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    "experts beside a dense MLP": Gemma4TextConfig(
        **SMALL,
        head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "frozen vision tower": build_gemma3().config,
}


def count_flops(config: PretrainedConfig, length: int = LENGTH, *, is_frozen: bool = False) -> int:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    ids = torch.arange(BATCH * length).reshape(BATCH, length) % 160
    inputs = {"input_ids": ids}
    if is_frozen:
        # Gradients of inputs pass through all layers, as with an adapter in the first one.
        model.requires_grad_(False)
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids).requires_grad_()}
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_match_flop_counter(name: str, is_frozen: bool) -> None:
    num_tokens = BATCH * LENGTH
    closed_form = compute_flops_per_token(CONFIGS[name], LENGTH, is_frozen=is_frozen).total(num_tokens, num_tokens)

    assert closed_form == pytest.approx(count_flops(CONFIGS[name], is_frozen=is_frozen), rel=0.02)


INDEXED = {**SMALL, **MLA, "num_key_value_heads": 4, "index_topk": 96, "index_n_heads": 4, "index_head_dim": 32}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        DeepseekV32Config(**INDEXED, n_routed_experts=8, num_experts_per_tok=2),
        GlmMoeDsaConfig(**INDEXED, n_routed_experts=8, num_experts_per_tok=2, indexer_types=["full", "shared", "full"]),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_term_grows_with_sequence_as_counted(config: PretrainedConfig) -> None:
    difference = compute_flops_per_token(config, 96).body - compute_flops_per_token(config, 48).body

    counted = count_flops(config, 96) / (BATCH * 96) - count_flops(config, 48) / (BATCH * 48)

    assert difference == pytest.approx(counted, rel=1e-6)


def test_sliding_layer_attends_within_window() -> None:
    shape = {**SMALL, "head_dim": 16, "sliding_window": 8}
    sliding = Gemma3TextConfig(**shape, layer_types=["sliding_attention"] * 3)
    full = Gemma3TextConfig(**shape, layer_types=["full_attention"] * 3)

    assert compute_flops_per_token(sliding, 512) == compute_flops_per_token(full, 8)
    assert compute_flops_per_token(sliding, 4) == compute_flops_per_token(full, 4)


def test_flops_without_attention_do_not_depend_on_length() -> None:
    config = MambaConfig(vocab_size=160, hidden_size=64, num_hidden_layers=3, state_size=8)
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters() if p.ndim == 2)
    flops = compute_flops_per_token(config, 8)
    assert flops == compute_flops_per_token(config, 512)
    assert flops.body + flops.head == pytest.approx(6 * weights, rel=0.05)


def test_window_without_layer_types_applies_to_all_layers() -> None:
    windowed = compute_flops_per_token(MistralConfig(**SMALL, sliding_window=16), 512)
    assert windowed == compute_flops_per_token(MistralConfig(**SMALL, sliding_window=None), 16)


def test_hybrid_layers_attend_to_all_keys_and_chunked_ones_to_a_chunk() -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    hybrid, full = FalconH1Config(**SMALL, **sizes), LlamaConfig(**SMALL)
    of_hybrid, of_full = (
        compute_flops_per_token(one, 96).body - compute_flops_per_token(one, 48).body for one in (hybrid, full)
    )
    assert of_hybrid == of_full
    chunked = Llama4TextConfig(**SMALL, head_dim=16, attention_chunk_size=16, layer_types=["chunked_attention"] * 3)
    assert compute_flops_per_token(chunked, 512) == compute_flops_per_token(chunked, 16)
    assert compute_flops_per_token(chunked, 16).body > compute_flops_per_token(chunked, 8).body


def test_head_flops_count_targets_only() -> None:
    flops = compute_flops_per_token(LlamaConfig(**SMALL), LENGTH)

    assert flops.total(100, 0) == 100 * flops.body
    assert flops.total(100, 30) - flops.total(100, 0) == 30 * 6 * 160 * 64


def test_step_counts_rows_and_passes_of_each_recipe(tiny_model_dir: Path) -> None:
    model_config = AutoConfig.from_pretrained(tiny_model_dir)
    flops = compute_flops_per_token(model_config, 64)
    whole = flops.body + flops.head

    def step(recipe: str, **changes: Any):
        rows = {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        return count_step(build_config(recipe, **rows, **changes), model_config, 4)

    assert dataclasses.astuple(step("sft")) == (24, 64, pytest.approx(whole * 24 * 64))
    assert step("sft").num_tokens == 24 * 64
    # The base model reads each row too.
    assert step("sft", kl_to_base=0.1).num_flops == pytest.approx(whole * 24 * 64 * 4 / 3)
    frozen = compute_flops_per_token(model_config, 64, is_frozen=True)
    assert step("lora").num_flops == pytest.approx((frozen.body + frozen.head) * 24 * 64)
    assert dataclasses.astuple(step("dpo")) == (48, 64, pytest.approx(whole * 48 * 64))
    assert step("dpo", precompute_ref_log_probs=False).num_flops == pytest.approx(whole * 48 * 64 * 4 / 3)
    assert step("reward").num_flops == pytest.approx(flops.body * 48 * 64)
    distilled = step("distill", teacher_model_name_or_path=str(tiny_model_dir))
    assert distilled.num_flops == pytest.approx(whole * 24 * 64 * 4 / 3)


@pytest.mark.parametrize(
    ("name", "queries", "keys"),
    [
        ("grouped_queries", 4 * 16, 2 * 16),
        # Keys of 8 + 8 features and values of 24.
        ("latent_attention_shared_expert", 4 * 20, 4 * 20),
        ("wider heads in global layers", 4 * 64 / 3, 2 * 64 / 3),
    ],
)
def test_features_are_those_of_queries_and_keys(name: str, queries: float, keys: float) -> None:
    """As the mean over three layers, of queries and outputs, or keys and values."""
    found = [count_attended(CONFIGS[name], 1, of_keys=of_keys) / 3 / 2 for of_keys in (False, True)]
    assert found == pytest.approx([queries, keys])
    assert count_attended(MambaConfig(vocab_size=160, hidden_size=64, num_hidden_layers=3), 1, of_keys=True) == 0


def test_differential_attention_weighs_the_values_of_two_heads_and_caches_them_once() -> None:
    """By each distribution over the keys: Ye et al. 2024, "Differential Transformer", equation 1."""
    config = DiffLlamaConfig(**SMALL)
    found = [count_attended(config, 1, of_keys=of_keys) for of_keys in (False, True)]
    assert found == [3 * 4 * (16 + 2 * 16), 3 * 2 * (16 + 16)]

"""Parameter counts, compared with published ones and closed forms; errors of invalid sizes."""

from __future__ import annotations

import json

import pytest
from tests.planning.test_compute import SMALL
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.planning.compute import ModelSize, compute_model_size, find_planned_model

LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_key_value_heads": 8}
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_key_value_heads": 8}

HUNYUAN_A13B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_167,
    "tie_word_embeddings": True,
    "num_experts": 64,
    # One number for each layer.
    "moe_topk": [8] * 32,
    "intermediate_size": 3072,
}

DBRX = {
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "vocab_size": 100_352,
    "attn_config": {"kv_n_heads": 8, "rope_theta": 500_000},
    "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4, "hidden_size": 6144},
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (GPT2Config(), 124_439_808, 124_439_808),
        (LlamaConfig(), 6_738_415_616, 6_738_415_616),
        (LlamaConfig(**LLAMA_70B, num_attention_heads=64), 68_976_648_192, 68_976_648_192),
        (MixtralConfig(), 46_702_792_704, 12_879_925_248),
    ],
)
def test_size_matches_published_count(config: PretrainedConfig, total: int, active: int) -> None:
    size = compute_model_size(config)

    assert (size.total, size.active) == (total, active)


def test_active_parameters_count_selected_experts() -> None:
    size = compute_model_size(DeepseekV3Config())  # DeepSeek-V3: 671B, of which 37B are active
    assert (round(size.total / 1e9), round(size.active / 1e9)) == (671, 38)

    shape = {**SMALL, "num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 2}
    few, all_of_them = (compute_model_size(Qwen3MoeConfig(**shape, num_experts_per_tok=n)) for n in (2, 8))
    assert few.total == all_of_them.total == all_of_them.active
    # One layer of three is sparse; an expert has three matrices.
    assert few.total - few.active == 1 * (8 - 2) * 3 * 64 * 32


@pytest.mark.parametrize(
    ("model_type", "sizes", "active"),
    [
        ("aria_text", {}, 8.85),
        # A third of its experts return their input; published: 18.6B to 31.3B, 27B on average.
        ("longcat_flash", {}, 27.95),
        # 120B; published: 5.13B, without the 0.58B of its token embeddings.
        ("gpt_oss", {}, 5.71),
        ("hunyuan_v1_moe", HUNYUAN_A13B, 12.75),
        # Published: 132B, of which 36B are active.
        ("dbrx", DBRX, 36.47),
    ],
)
def test_experts_are_counted_by_names_of_architecture(model_type: str, sizes: dict[str, object], active: float) -> None:
    size = compute_model_size(AutoConfig.for_model(model_type, **sizes))
    assert round(size.active / 1e9, 2) == active


def test_experts_without_number_of_selected_ones_raise() -> None:
    with pytest.raises(ConfigError, match="has 64 experts, and none is selected"):
        compute_model_size(AutoConfig.for_model("deepseek_v2"))


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_embeddings_are_counted_once(is_tied: bool) -> None:
    size = compute_model_size(LlamaConfig(**SMALL, tie_word_embeddings=is_tied))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64

    assert size.non_embedding == 3 * layer + 64
    assert size.total == size.active == size.non_embedding + (1 if is_tied else 2) * 160 * 64


def test_learned_positions_count_as_embeddings() -> None:
    sizes = [compute_model_size(GPT2Config(n_positions=n, n_embd=64, n_layer=1, n_head=4)) for n in (128, 256)]

    assert sizes[1].total - sizes[0].total == 128 * 64
    assert sizes[1].non_embedding == sizes[0].non_embedding == 12 * 64 * 64 + 13 * 64 + 2 * 64


def test_counting_405b_parameters_allocates_no_weights() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert compute_model_size(LlamaConfig(**LLAMA_405B, num_attention_heads=128, vocab_size=128_256)) == ModelSize(
        405_853_388_800, 401_650_696_192, 405_853_388_800
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB; the weights are 1.6 TB


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL, hidden_act="unknown"), GPT2Config(n_layer=1, n_embd=64, n_head=5)]
)
def test_inconsistent_sizes_raise(config: PretrainedConfig) -> None:
    with pytest.raises(ConfigError, match="cannot be built"):
        compute_model_size(config)


@pytest.mark.parametrize(("key", "size"), [("num_hidden_layers", 0), ("num_hidden_layers", -1), ("vocab_size", 0)])
def test_model_config_with_size_below_one_raises(key: str, size: int) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100} | {key: size}
    architecture = json.dumps({"model_type": "llama", **sizes})
    keys = {"tokenizer_name_or_path": "a/b", "dataset_name": "a/c", "output_dir": "o", "max_length": 64, "max_steps": 4}
    settings = (keys | {"model_config": architecture}).items()
    config = load_config("pretrain", [f"--{name}={value}" for name, value in settings])
    with pytest.raises(ConfigError, match=f"`{key}` is {size}"):
        find_planned_model(config)

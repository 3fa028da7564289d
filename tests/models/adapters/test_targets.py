"""Validation of adapter targets and options against the model, with every problem at once."""

from types import SimpleNamespace

import pytest
import torch
from tests.models.adapter_models import build_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV32Config,
    FalconMambaConfig,
    Gemma3nTextConfig,
    HunYuanMoEV1Config,
    JetMoeConfig,
    LongcatFlashConfig,
    PhimoeConfig,
    Qwen3_5TextConfig,
    ZambaConfig,
)

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import (
    add_adapter,
    check_layers,
    find_bare_layers,
    find_modules,
    find_targets,
    stores_transposed,
)

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SPARSE = {"index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 2, "n_routed_experts": 4}
# Compressed layers attend to blocks of as many tokens.
RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
COMPRESSED = {
    **{"head_dim": 16, "q_lora_rank": 16, "moe_intermediate_size": 16, "o_groups": 2, "o_lora_rank": 8},
    **{"n_routed_experts": 4, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    **{"compress_rates": RATES, "layer_types": [*RATES], "sliding_window": 8},
}
LAYERED = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
    "activation_sparsity_pattern": [0.0] * 2,
}
# Both hybrid layers share one transformer block.
SHARED = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8, "mamba_dt_rank": 4}


def problems_of(model, **keys):
    return [*check_layers(model, AdapterConfig(use_peft=True, **keys))]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lora_target_modules": ["q_proj", "self_attn.v_proj", "model.layers.0.mlp.up_proj"]},
        {"lora_modules_to_save": ["embed_tokens", "lm_head", "norm"]},
        {"init_lora_weights": "pissa", "lora_r": 8},
        {"init_lora_weights": "olora", "lora_r": 8},
        {"init_lora_weights": "orthogonal", "lora_r": 32},
    ],
)
def test_existing_layers_are_accepted(keys):
    model = build_model("llama")
    assert problems_of(model, **keys) == []
    for weight in model.parameters():  # As ZeRO-3 leaves them until it gathers them.
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    assert problems_of(model, **keys) == []


@pytest.mark.parametrize(
    ("keys", "where", "found", "remedy"),
    [
        ({"lora_target_modules": ["q_porj"]}, "lora_target_modules", "no module 'q_porj'", "did you mean `q_proj`"),
        (
            {"lora_target_modules": ["q_porj"], "init_lora_weights": "pissa"},
            "lora_target_modules",
            "no module",
            "q_proj",
        ),
        ({"lora_target_modules": ["mlp"], "init_lora_weights": "olora"}, "lora_target_modules", "LlamaMLP", "inside"),
        ({"lora_target_modules": ["c_attn"]}, "lora_target_modules", "no module 'c_attn'", "there are down_proj, gate"),
        ({"lora_target_modules": ["proj"]}, "lora_target_modules", "no module 'proj'", "did you mean"),
        ({"lora_target_modules": ["norm"]}, "lora_target_modules", "norm is a LlamaRMSNorm", "layers inside"),
        ({"lora_target_modules": ["mlp"]}, "lora_target_modules", "mlp is a LlamaMLP", "layers inside"),
        ({"lora_target_modules": ["lm_head"]}, "lora_target_modules", "output projection", "lora_modules_to_save"),
        ({"lora_target_modules": ["embed_tokens"]}, "lora_target_modules", "embedding", "lora_modules_to_save"),
        ({"lora_modules_to_save": ["embed_token"]}, "lora_modules_to_save", "no module", "did you mean `embed_tokens`"),
        ({"init_lora_weights": "orthogonal", "lora_r": 3}, "lora_r", "even rank", "write 4"),
        ({"init_lora_weights": "pissa", "lora_r": 9}, "lora_r", "at most 8", "write 8 or less"),
    ],
)
def test_invalid_targets_and_options_are_reported_with_remedy(keys, where, found, remedy):
    (problem,) = problems_of(build_model("llama"), **keys)
    assert problem.where == where
    assert found in problem.found
    assert remedy in problem.remedy


def test_all_problems_are_reported_at_once():
    keys = {"lora_target_modules": ["q_porj", "q_proj", "nrom"], "lora_modules_to_save": ["nothing"]}
    config = AdapterConfig(use_peft=True, **keys, init_lora_weights="orthogonal", lora_r=5)
    with pytest.raises(ConfigError) as caught:
        add_adapter(build_model("llama"), config, seed=0)
    assert len(caught.value.problems) == 4


def test_olora_is_refused_on_transposed_weights():
    (problem,) = problems_of(build_model("gpt2"), init_lora_weights="olora", lora_r=4)
    assert problem.where == "init_lora_weights"
    assert problems_of(build_model("gpt2"), init_lora_weights="pissa", lora_r=4) == []


def test_default_targets_are_all_linear_layers_except_output_projection():
    model = build_model("llama")
    assert len(find_targets(model, AdapterConfig())) == 2 * 7
    assert "lm_head" not in find_targets(model, AdapterConfig())
    assert find_targets(model, AdapterConfig(lora_target_modules=["1.mlp.up_proj"])) == {
        "model.layers.1.mlp.up_proj": model.model.layers[1].mlp.up_proj
    }


@pytest.mark.parametrize(
    "config",
    [
        FalconMambaConfig(**SMALL, state_size=8, time_step_rank=4),
        DeepseekV32Config(**SMALL, **HEADS, **LATENT, **SPARSE),
        DeepseekV4Config(**SMALL, num_attention_heads=4, **COMPRESSED),
        PhimoeConfig(**SMALL, **HEADS, num_local_experts=2),
        LongcatFlashConfig(
            **{**SMALL, **HEADS, **LATENT, "head_dim": 8}, n_routed_experts=4, expert_ffn_hidden_size=16
        ),
        ZambaConfig(**{**SMALL, **HEADS, **SHARED, "num_hidden_layers": 4}),
        Gemma3nTextConfig(**SMALL, **HEADS, head_dim=8, num_kv_shared_layers=0, **LAYERED),
    ],
    ids=lambda config: config.model_type,
)
def test_every_default_target_receives_gradient_and_is_merged(config):
    torch.manual_seed(0)
    adapted = add_adapter(AutoModelForCausalLM.from_config(config), AdapterConfig(use_peft=True, lora_r=2), seed=0)
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(value, std=0.1)
    ids = torch.arange(2, 14)[None]
    adapted.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    outputs = adapted.eval()(input_ids=ids, use_cache=False)
    assert [name for name, value in trained.items() if value.grad is None] == []
    merged = adapted.merge_and_unload()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(merged, outputs.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [HunYuanMoEV1Config(**SMALL, **HEADS, head_dim=8, num_experts=4), JetMoeConfig(**SMALL, num_local_experts=4)],
)
def test_routers_that_are_linear_layers_are_no_default_targets(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert any(path.endswith(("gate.wg", "router.layer")) for path, _ in model.named_modules())
    assert not [path for path in find_targets(model, AdapterConfig()) if "router" in path or "gate." in path]


def test_layers_that_share_their_weights_are_refused_as_targets():
    model = AutoModelForCausalLM.from_config(ZambaConfig(**{**SMALL, **HEADS, **SHARED, "num_hidden_layers": 4}))
    assert problems_of(model, lora_target_modules=["in_proj"]) == []
    (problem,) = problems_of(model, lora_target_modules=["q_proj"])
    assert "q_proj share their weights" in problem.found


def test_module_name_matches_whole_path_components():
    assert set(find_modules(build_model("llama"), "q_proj")) == {f"model.layers.{n}.self_attn.q_proj" for n in range(2)}
    assert find_modules(build_model("llama"), "_proj") == {}


def test_transposed_weights_are_detected_for_gpt2_only():
    assert stores_transposed(build_model("gpt2"), AdapterConfig())
    assert not stores_transposed(build_model("llama"), AdapterConfig())
    assert build_model("gpt2").transformer.h[0].attn.c_attn.weight.shape == torch.Size([16, 48])


@pytest.mark.parametrize(
    ("names", "is_partial"), [(["q_proj", "v_proj"], True), (["o_proj", "out_proj"], False), (None, False)]
)
def test_targets_of_few_layers_are_cautioned_about(names, is_partial):
    """Three of four layers of Qwen 3.5 have linear attention, whose projections have other names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SMALL | {"num_hidden_layers": 4}, **HEADS))
    caution = find_bare_layers(model, AdapterConfig(use_peft=True, lora_target_modules=names))
    assert ("1 of 4 layers" in str(caution)) == is_partial


def test_model_without_number_of_layers_is_not_cautioned_about(monkeypatch):
    model = build_model("llama")
    config = SimpleNamespace(get_text_config=SimpleNamespace, sub_configs={})  # As of BLT.
    monkeypatch.setattr(model, "config", config)
    assert find_bare_layers(model, AdapterConfig(use_peft=True, lora_target_modules=["q_proj"])) is None

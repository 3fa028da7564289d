"""LoRA on mixture-of-experts models: fused expert weights get no adapter, and PEFT's own expert handling is refused."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.models.adapter_models import SHAPE, compute_logits, train
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters import lora
from recipes_lib.models.adapters.lora import (
    add_adapter,
    check_layers,
    load_adapter,
    load_fresh_base,
    read_adapter_state,
)
from recipes_lib.models.adapters.saved import iterate_weights

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
RANK = 4


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))


def qwen3_moe(model_class=Qwen3MoeForCausalLM, **changes):
    return model_class(Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, **changes))


def qwen2_moe():
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=8))


def deepseek_v3():
    """A model whose first layer is dense, and whose second has a shared expert."""
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SHAPE, "num_key_value_heads": 2}, **heads, **experts, first_k_dense_replace=1)
    )


def adapt(model, **keys):
    return add_adapter(model, AdapterConfig(use_peft=True, lora_r=RANK, **keys), seed=0)


def list_adapted(model):
    return {name for name, module in model.get_base_model().named_modules() if hasattr(module, "base_layer")}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (mixtral, ATTENTION),
        (qwen3_moe, ATTENTION),
        (qwen2_moe, {*ATTENTION, "gate_proj", "up_proj", "down_proj", "shared_expert_gate"}),
        (deepseek_v3, {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ],
)
def test_lora_targets_linear_layers_only_with_expected_parameter_count(build, expected):
    layers = {name: module for name, module in build().named_modules() if isinstance(module, nn.Linear)}
    adapted = adapt(build())
    found = list_adapted(adapted)
    assert found == {name for name in layers if name.rpartition(".")[2] in expected}
    assert adapted.get_nb_trainable_parameters()[0] == sum(RANK * sum(layers[name].weight.shape) for name in found)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"lora_dropout": 0.5}])
@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_every_adapter_option_trains_on_moe_model(build, options):
    assert {name.rpartition(".")[2] for name in list_adapted(adapt(build(), **options))} == ATTENTION


def test_moe_reward_model_has_no_lora_on_score_head():
    adapted = add_adapter(
        qwen3_moe(Qwen3MoeForSequenceClassification, num_labels=1, pad_token_id=0),
        AdapterConfig(use_peft=True, lora_r=RANK, init_lora_weights="pissa"),
        seed=0,
        task_type="SEQ_CLS",
    )
    assert {name.rpartition(".")[2] for name in list_adapted(adapted)} == ATTENTION


@pytest.mark.parametrize("build", [mixtral, qwen3_moe, deepseek_v3])
def test_merged_weights_keep_names_and_logits_of_moe_model(build):
    model, other = build(), build()
    shapes = [(name, list(value.shape)) for name, value in model.named_parameters()]
    adapted = adapt(model)
    train(adapted)
    weights = dict(iterate_weights(adapted))
    assert [(name, list(value.shape)) for name, value in weights.items()] == shapes
    other.load_state_dict(weights, strict=False)  # Buffers are not yielded.
    torch.testing.assert_close(compute_logits(other), compute_logits(adapted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [mixtral, deepseek_v3])
def test_saved_moe_adapter_loads_in_plain_peft_with_equal_logits(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "base")
    adapted = adapt(type(model).from_pretrained(tmp_path / "base"))
    train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = compute_logits(adapted)
    assert not torch.equal(expected, compute_logits(load_fresh_base(adapted)))
    again = PeftModel.from_pretrained(load_fresh_base(adapted), str(tmp_path / "adapter"))
    assert torch.equal(compute_logits(again), expected)
    assert torch.equal(compute_logits(load_adapter(load_fresh_base(adapted), str(tmp_path / "adapter"))), expected)


@pytest.mark.parametrize(
    ("build", "name"),
    [(deepseek_v3, "gate_proj"), (deepseek_v3, "shared_experts.down_proj"), (qwen3_moe, "gate"), (mixtral, "gate")],
)
def test_target_that_peft_treats_as_experts_is_refused_by_name(build, name):
    (problem,) = check_layers(build(), AdapterConfig(use_peft=True, lora_target_modules=["o_proj", name]))
    assert problem.where == "lora_target_modules"
    assert name in problem.found
    assert "experts" in problem.found


def test_saved_adapter_with_expert_weights_is_refused(tmp_path):
    model = qwen3_moe()
    stacked = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    stacked.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bare parameters"):
        list(iterate_weights(stacked))
    with pytest.raises(ConfigError, match="gate_up_proj"):
        load_adapter(qwen3_moe(), str(tmp_path), on_any_base=True)


def test_weights_that_peft_does_not_restore_are_restored_or_refused(tmp_path, monkeypatch):
    """transformers renames `shared_experts` of Laguna to a name that no module has, and PEFT only warns."""
    sizes = {"num_attention_heads_per_layer": [2, 2], "shared_expert_intermediate_size": 8, "head_dim": 8}
    model = LagunaForCausalLM(LagunaConfig(**SHAPE, **EXPERTS, **sizes))
    model.save_pretrained(tmp_path / "base")
    add_adapter(model, AdapterConfig(use_peft=True), seed=0).save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")

    def load():
        return load_adapter(LagunaForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter"))

    restored = read_adapter_state(load())
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
    copies = {name: tensor + 1 for name, tensor in saved.items()}
    monkeypatch.setattr(lora, "read_adapter_state", lambda model: {name: one.clone() for name, one in copies.items()})
    with pytest.raises(ConfigError, match=rf"PEFT does not restore {len(saved)} weights of "):
        load()

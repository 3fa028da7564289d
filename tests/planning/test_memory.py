"""Planned memory by recipe and layout, compared with closed forms; of PPO in ``tests/rl/test_memory.py``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.live_tensors import LiveTensors
from tests.models.vision_models import build_gemma3
from tests.planning.runs import build_config
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CTRLConfig,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    LlamaConfig,
    RwkvConfig,
)

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError
from recipes_lib.losses.distillation import DistillationTargets, Objective, TeacherHead, TopLogps, compute_distillation
from recipes_lib.losses.next_token import compute_cross_entropy, compute_token_logps
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.structure import freeze_outside_text
from recipes_lib.planning import activations, compute, memory
from recipes_lib.planning.activations import MODES, list_keys
from recipes_lib.planning.memory import (
    count_kept,
    count_logit_bytes,
    find_critic_start,
    plan_memory,
    resolve_checkpointing,
)
from recipes_lib.planning.memory_plan import KINDS, LOGITS, UPDATE, Held, Layout

KEYS: dict[str, Any] = {
    "max_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "activation_checkpointing": True,
}
SINGLE, REPLICATED, SHARDED = Layout("single_gpu"), Layout("ddp", 4), Layout("fsdp2", 4, Held(4, 4, 4))
KEPT = "activations of a micro-batch"
NARROW = "16-bit copies of the weights in a pass"
GATHERED = "gathered: layers, embeddings and output projection"


FEW_LAYERS = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def build(tiny_model_dir: Path):
    def build(recipe: str, **changes: Any) -> RecipeConfig:
        return build_config(recipe, **KEYS | {"model_name_or_path": tiny_model_dir} | changes)

    return build


def test_critic_start_has_revision_of_named_model(build) -> None:
    """``model_revision`` is that of the policy, and ``reward_model_revision`` that of the reward model."""
    keys = {"model_name_or_path": "us/policy", "model_revision": "a", "reward_funcs": "m:f"}
    scored = keys | {"reward_model_name_or_path": "us/reward", "reward_model_revision": "b"}
    for given, name, revision in (
        (keys, "us/policy", "a"),
        (scored, "us/reward", "b"),
        (scored | {"critic_model_name_or_path": "us/policy"}, "us/policy", "a"),
        (scored | {"critic_model_name_or_path": "us/reward"}, "us/reward", "b"),
        (scored | {"critic_model_name_or_path": "us/other"}, "us/other", None),
    ):
        assert find_critic_start(build("ppo", response_length=8, **given)) == (name, revision)


def test_critic_is_planned_with_revision_of_reward_model(build, tiny_model_dir, monkeypatch) -> None:
    revisions = []
    monkeypatch.setattr(compute, "find_shape", lambda model: revisions.append(model.model_revision) or small)
    small = AutoConfig.from_pretrained(tiny_model_dir)
    keys = {"reward_model_name_or_path": "us/reward", "reward_model_revision": "b", "response_length": 8}
    monkeypatch.setattr(memory, "find_base", lambda named: (named, None))
    plan_memory(build("ppo", **keys), small, SINGLE)
    assert revisions == ["b", "b"]


@pytest.fixture
def count(build, tiny_model_dir: Path):
    """Return a function that plans a recipe, and returns the components of a process."""

    def count(recipe: str, layout: Layout = SINGLE, **changes: Any) -> Mapping[str, int]:
        return plan_memory(build(recipe, **changes), AutoConfig.from_pretrained(tiny_model_dir), layout).components

    return count


@pytest.fixture(scope="module")
def num_parameters(tiny_model_dir: Path) -> int:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()


@pytest.mark.parametrize(
    ("optim", "dtype", "width", "state_bytes"),
    [
        ("adamw_torch_fused", "float32", 4, 8),
        ("sgd", "float32", 4, 0),
        # States have the dtype of the weights, except for optimizers with a fixed one.
        ("adamw_torch_fused", "bfloat16", 2, 4),
        ("adamw_8bit", "bfloat16", 2, 2.3),
    ],
)
def test_full_training_counts_weights_gradients_and_states(count, num_parameters, optim, dtype, width, state_bytes):
    terms = count("sft", optim=optim, dtype=dtype)
    assert terms["model, weights"] == terms["model, gradients"] == width * num_parameters
    assert terms.get("model, optimizer states", 0) == pytest.approx(state_bytes * num_parameters, abs=1)
    assert terms.get(NARROW, 0) == (2 * (num_parameters - 512 * 64) if width == 4 else 0)  # Embeddings are looked up.
    assert "frozen base, weights" not in terms


@pytest.mark.parametrize(
    ("recipe", "keys"), [("sft", {}), ("grpo", {"reward_funcs": ["a.b:c"], "response_length": 8, "beta": 0})]
)
def test_frozen_vision_tower_has_weights_only(build, recipe, keys) -> None:
    model = build_gemma3()
    freeze_outside_text(model)
    components = plan_memory(build(recipe, **keys), model.config, SINGLE).components
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(size for name, size in components.items() if name.endswith(", gradients")) == 4 * num_trained
    assert sum(size for name, size in components.items() if name.endswith(", optimizer states")) == 8 * num_trained
    weights = sum(size for name, size in components.items() if name.endswith(", weights"))
    assert weights == 4 * model.num_parameters() > 4 * num_trained


def test_fsdp2_shards_states_and_ddp_adds_gradient_buckets(count, num_parameters) -> None:
    copied, shared = count("sft", REPLICATED), count("sft", SHARDED)
    assert copied["buckets in which gradients are summed"] == copied["model, gradients"] == 4 * num_parameters
    for name in ("model, weights", "model, gradients", "model, optimizer states"):
        assert shared[name] == copied[name] // 4
    # This model has two layers, so that all of it is gathered.
    assert shared[GATHERED] == 2 * num_parameters
    # Hidden states are in 16 bits if FSDP2 casts the weights, and in their dtype under autocast.
    assert shared[KEPT] < copied[KEPT] == count("sft")[KEPT]
    assert NARROW not in shared


def test_adapter_trains_low_rank_weights_on_frozen_base(count, num_parameters) -> None:
    terms = count("lora", lora_r=4, dtype="bfloat16")
    # Plus buffers of rotary embeddings.
    assert terms["frozen base, weights"] == pytest.approx(2 * num_parameters, rel=1e-3)
    # Rank 4 on seven linear layers of two decoder layers: in and out features of each.
    features = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert terms["model, weights"] == 4 * features
    assert terms["model, optimizer states"] == 8 * features
    # A reward model has a score head instead of the output projection.
    scored = count("reward", lora_r=4, dtype="bfloat16", use_peft=True)["frozen base, weights"]
    assert scored == terms["frozen base, weights"] - 2 * 64 * (512 - 1)


def test_quantized_base_counts_bits_of_linear_layers(count, tiny_model_dir) -> None:
    whole, quarter = (count("lora", lora_r=4, dtype="bfloat16", load_in_4bit=bits) for bits in (False, True))
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    saved = whole["frozen base, weights"] - quarter["frozen base, weights"]
    assert saved == pytest.approx(2 * linear - (0.5 + (1 + 4 / 256) / 64) * linear, rel=1e-3)
    # bitsandbytes has the scales beside the parameters, which FSDP2 shards or offloads without them.
    for shards, rest in ((1, 0), (4, 3 / 4), (0, 1)):
        keys = {"load_in_4bit": True, "use_bnb_nested_quant": False, "lora_r": 4}
        scales = count("lora", Layout("fsdp2", 4, Held(shards, shards, shards)), **keys).get(
            "scales of 4-bit weights, not sharded", 0
        )
        assert scales == rest * linear * 4 / 64


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_layers_hold_16_bit_copies_of_frozen_weights_unless_recomputed_or_quantized(count, is_recomputed) -> None:
    keys = {"lora_r": 4, "activation_checkpointing": is_recomputed}
    copied, quantized = (count("lora", load_in_4bit=bits, **keys) for bits in (False, True))
    layer, before_first_adapter = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128, 64 * 64 + 2 * 64 * 32
    held = layer if is_recomputed else 2 * layer - before_first_adapter
    assert copied[KEPT] - quantized[KEPT] == 2 * held
    assert copied[NARROW] == quantized[NARROW] == 2 * (copied["model, weights"] // 4 + 512 * 64)


@pytest.mark.parametrize(
    ("layout", "options", "dtypes"),
    [
        # Rotation by float32 angles follows the projection of keys under autocast, and none that of values.
        (SINGLE, {}, (torch.float32, torch.bfloat16)),
        (SHARDED, {}, (torch.bfloat16, torch.bfloat16)),
        (SHARDED, {"bf16": False}, (torch.float32, torch.float32)),
    ],
)
def test_cache_has_dtypes_of_a_pass(count, layout, options, dtypes) -> None:
    terms = count("grpo", layout, reward_funcs=["a.b:c"], response_length=8, per_device_eval_batch_size=4, **options)
    cache = DynamicCache()
    for layer in range(2):
        # transformers 5.23 stores values in the type of keys, 5.24 in their own.
        keys, values = (torch.zeros(4, 2, 64, 16, dtype=dtype) for dtype in dtypes)
        cache.update(keys, values, layer)
    expected = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert terms["KV cache of a batch"] == expected


def test_vllm_caches_latents_of_latent_attention(build) -> None:
    """DeepSeek-V3 caches 70,272 bytes a token in 61 layers (DeepSeek-AI 2025, "Insights into DeepSeek-V3", table 1)."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = DeepseekV3Config(**FEW_LAYERS | experts, kv_lora_rank=512, qk_rope_head_dim=64, first_k_dense_replace=2)
    keys = {"reward_funcs": ["a.b:c"], "response_length": 8, "use_vllm": True, "vllm_mode": "colocate"}
    assert plan_memory(build("grpo", **keys), model, SINGLE).engine_row == 64 * 70_272 * 2 / 61


def test_teacher_and_live_reference_count(count, tiny_model_dir, num_parameters) -> None:
    size = pytest.approx(4 * num_parameters, rel=1e-3)
    assert count("distill", teacher_model_name_or_path=tiny_model_dir)["teacher, weights"] == size
    assert count("dpo", precompute_ref_log_probs=False)["reference, weights"] == size
    assert "reference, weights" not in count("dpo")


def test_adapted_policy_is_planned_without_weights_and_has_reference_unless_adapter_is_new(
    count, tiny_model_dir, tmp_path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with warnings.catch_warnings(action="ignore"):
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    for keys, has_reference in (
        ({}, False),
        ({"init_lora_weights": "pissa"}, True),
        ({"ref_model_name_or_path": "a/other"}, True),
        ({"adapter_name_or_path": tmp_path / "adapter"}, True),
    ):
        with warnings.catch_warnings(action="error"):
            terms = count("dpo", use_peft=True, precompute_ref_log_probs=False, **keys)
        assert terms.get("reference, weights") == (terms["frozen base, weights"] if has_reference else None)


def test_checkpointing_kwargs_order_activation_memory(count) -> None:
    none, whole = count("sft", activation_checkpointing=False)[KEPT], count("sft")[KEPT]
    selective, half, offloaded = (
        count("sft", activation_checkpointing_kwargs=options)[KEPT]
        for options in ({"save_matmuls": True}, {"every_n_layers": 2}, {"offload": True})
    )
    assert offloaded < whole < selective < none
    # Of two layers, the second is freed before the first is recomputed, and its input is not saved twice.
    assert half < whole


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_auto_checkpointing_is_fastest_mode_with_free_tenth(build, tiny_model_dir, stage) -> None:
    model_config = AutoConfig.from_pretrained(tiny_model_dir, num_hidden_layers=4)
    keys = {"reward_funcs": ["nothing:at_all"], "response_length": 16} if stage == "ppo" else {}

    def plan(**changes):
        config = build(stage, **keys).with_training(changes)
        return config, plan_memory(config, model_config, Layout("ddp"), device_bytes=1e9)

    # Reference: a separate plan of each mode.
    explicit = {mode: plan(**list_keys(mode))[1] for mode in MODES}
    config, auto = plan(activation_checkpointing="auto")
    sizes = {mode: one.place(80e9).peak for mode, one in explicit.items()}
    # In PPO, sampling needs more memory than updates of such a small model.
    assert stage == "ppo" or sizes["none"] > sizes["every 2nd layer"] > sizes["every layer"]
    for mode, size in sizes.items():
        device = size / 0.9 + 1
        chosen = auto.place(device)
        fitting = [name for name in MODES if explicit[name].place(device).peak <= 0.9 * device]
        assert chosen.checkpointing == fitting[0]
        assert chosen.components == explicit[fitting[0]].place(device).components
        settled = resolve_checkpointing(config, chosen).training
        assert {key: settled[key] for key in list_keys(mode)} == list_keys(fitting[0])
    # If no mode fits, the one with least memory is chosen.
    assert auto.place(sizes["every layer"] - 1).checkpointing == "every layer"
    assert not auto.fits(sizes["every layer"] / 2)
    text = "\n".join(auto.describe({"GPU": device}))
    assert f"activation checkpointing: {chosen.checkpointing} (" in text
    assert f"{chosen.checkpointing} {chosen.peak / 1e9:.1f} GB; {0.9 * device / 1e9:.1f} GB may be planned" in text


def test_eager_attention_and_liger_change_activations(count) -> None:
    by_kernel, by_eager, by_liger = (
        count("sft", activation_checkpointing=False, **keys)[KEPT]
        for keys in ({}, {"attn_implementation": "eager"}, {"use_liger_kernel": True})
    )
    # 2 layers, 2 rows, 4 heads: probabilities of 64^2 tokens in 4 and 2 bytes, without log-sum-exp.
    assert by_eager - by_kernel >= 2 * (6 * 2 * 4 * 64**2 - 4 * 2 * 4 * 64)
    assert by_liger < 0.9 * by_kernel


@pytest.mark.parametrize("recipe", ["sft", "lora"])
def test_activations_of_deep_model_follow_from_layers_after_the_first(build, recipe) -> None:
    """Dense layers alternate with experts; with an adapter, the first layer saves less than the other dense ones."""
    sizes = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts": 4, "num_experts_per_tok": 2}
    model_config = AutoConfig.for_model("qwen3_moe", **FEW_LAYERS | sizes, num_key_value_heads=4)
    whole = count_kept(build(recipe), model_config, SINGLE, num_built=4)
    assert count_kept(build(recipe), model_config, SINGLE) == whole


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        # Three recurrent layers, one with attention.
        ("qwen3_5_text", {"num_hidden_layers": 5, "head_dim": 16, "intermediate_size": 64}),
        # Three dense layers, then experts.
        ("deepseek_v3", {"num_hidden_layers": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}),
        # Attention in the fifth layer, experts in every second one.
        ("jamba", {"num_hidden_layers": 6, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}),
        # Two dense layers; then convolutions with experts, and attention with experts.
        ("lfm2_moe", {"num_hidden_layers": 5, "layer_types": [*["conv"] * 2, "full_attention", *["conv"] * 2]}),
    ],
)
def test_layers_of_another_kind_than_the_first_count(build, model_type, sizes) -> None:
    model_config = AutoConfig.for_model(model_type, **FEW_LAYERS | {"topk_group": 1, "num_key_value_heads": 4} | sizes)
    whole, followed = (
        [layer.total for layer in count_kept(build("sft"), model_config, SINGLE, num_built=number).layers]
        for number in (8, 1)
    )
    assert followed == pytest.approx(whole, rel=0.01)
    assert max(whole) > 1.05 * min(whole)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_embeddings_of_each_layer_count(build, num_shared: int) -> None:
    """They are looked up for all layers at once; the last layers may share keys and values, as in Gemma 4 E2B."""
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": num_shared, "vocab_size_per_layer_input": 9}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True}
    model_config = AutoConfig.for_model("gemma4_text", **FEW_LAYERS | sizes | kinds, num_key_value_heads=4)
    assert len({count_kept(build("sft", max_length=64), model_config, SINGLE, num_built=n) for n in (1, 4)}) == 1


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int, int]]:
    """Rows, length and predicted tokens of each counted pass, of which none is known before."""
    passes, count = [], activations.count_activations
    monkeypatch.setattr(
        activations, "count_activations", lambda model, *batch: passes.append(batch) or count(model, *batch)
    )
    monkeypatch.setattr(memory, "_FOUND", {})
    return passes


def test_equal_activations_are_counted_once(build, tiny_model_dir, passes) -> None:
    model_config = AutoConfig.from_pretrained(tiny_model_dir)
    # The placement of replicated weights makes no difference.
    for layout, expected in ((SINGLE, 1), (REPLICATED, 1), (SINGLE, 1), (SHARDED, 2)):
        count_kept(build("sft"), model_config, layout)
        assert len(passes) == expected


@pytest.mark.parametrize(
    ("shape", "recipe", "keys"),
    [
        pytest.param(LlamaConfig, "sft", {"bf16": False, "fp16": True}, marks=pytest.mark.slow),
        (LlamaConfig, "dpo", {"use_liger_kernel": True}),
        (Gemma3TextConfig, "lora", {}),
        # Eager attention makes fewer copies of a single row.
        (Gemma3TextConfig, "sft", {"attn_implementation": "eager"}),
    ],
)
@pytest.mark.parametrize("layout", [REPLICATED, SHARDED])
def test_activations_of_many_rows_follow_from_two_and_three(build, passes, monkeypatch, shape, recipe, keys, layout):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    model = shape(vocab_size=300, **sizes, num_attention_heads=4, num_key_value_heads=2)
    config = build(recipe, per_device_train_batch_size=7, **keys)
    found = count_kept(config, model, layout)
    assert {number for number, *_ in passes} == {2, 3}
    monkeypatch.setattr(memory, "_LINEAR_FROM", 14)
    assert found == count_kept(config, model, layout)


def test_preference_pair_counts_as_two_rows(count) -> None:
    one, two = (count("dpo", per_device_train_batch_size=rows)[KEPT] for rows in (1, 2))
    as_rows = count("sft", per_device_train_batch_size=2)[KEPT]
    assert one == as_rows
    assert two == pytest.approx(2 * one, rel=0.01)


def test_planning_large_model_allocates_no_weights(build, tiny_model_dir) -> None:
    large = AutoConfig.from_pretrained(tiny_model_dir, hidden_size=65536, intermediate_size=262144, head_dim=16384)
    assert plan_memory(build("sft"), large, SINGLE).components["model, weights"] > 2e11


def test_compute_dtype_without_autocast_is_that_of_weights(count) -> None:
    """16-bit weights without autocast have the activations of weights cast by FSDP2, without copies."""
    by_cast, by_type = count("sft", SHARDED), count("sft", dtype="bfloat16", bf16=False)
    assert by_type[KEPT] == by_cast[KEPT] < count("sft")[KEPT]
    assert by_type[KEPT] < 0.6 * count("sft", bf16=False)[KEPT]
    assert NARROW not in by_type
    assert count("sft", SHARDED, dtype="bfloat16", bf16=False)[GATHERED] == by_cast[GATHERED]


def test_states_are_divided_by_zero_stage(count, num_parameters: int) -> None:
    """ZeRO stages 1 to 3 shard states, then gradients, then weights."""
    for shards in (Held(1, 1, 4), Held(1, 4, 4), Held(4, 4, 4)):
        components = count("sft", Layout("", 4, shards))
        held = [components[f"model, {kind}"] for kind in KINDS]
        assert held == [size * num_parameters // number for size, number in zip((4, 4, 8), shards, strict=True)]
        assert ("buckets in which gradients are summed" in components) == (shards.gradients == 1)
        assert (NARROW in components) == (shards.weights == 1)


@pytest.fixture
def plan_pretraining(count):
    return partial(count, "pretrain", max_steps=4)


def test_offloaded_zero_holds_16_bit_weights_only(plan_pretraining, num_parameters) -> None:
    """Published sizes of each ZeRO stage are in ``test_known_answers.py``."""
    components = plan_pretraining(Layout("", 4, Held(4, 0, 0), is_deepspeed=True))
    held = sum(components.get(f"model, {kind}", 0) for kind in KINDS)
    assert held == pytest.approx(2 / 4 * num_parameters, abs=3)
    assert NARROW not in components
    assert components["bucket in which gradients are reduced"] == 2 * 500_000_000
    assert UPDATE not in components


def test_zero_has_16_bit_gradients_until_the_update(build, plan_pretraining, num_parameters) -> None:
    """As DeepSpeed allocates them: joined in 16 bits and cast to 32, when no activations are held."""
    for shards in (Held(1, 1, 4), Held(1, 4, 4), Held(4, 4, 4)):
        layout = Layout("", 4, shards, is_deepspeed=True)
        assert plan_pretraining(layout)[UPDATE] == pytest.approx((2 + 4) * num_parameters / 4, abs=6)
    reduced = "gradients before they are reduced"
    shape = LlamaConfig(**FEW_LAYERS, intermediate_size=128)
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    # FSDP2 copies 16-bit gradients of a layer to a 32-bit tensor, or those of embeddings, projection and final norm.
    for number, expected in ((300, 6 * layer + 2 * 300 * 64), (15_000, 4 * (2 * 15_000 * 64 + 64))):
        shape.vocab_size = number
        assert plan_memory(build("sft"), shape, SHARDED).components[reduced] == expected
        narrow = 2 * max(layer, 2 * number * 64 + 64)
        assert plan_memory(build("sft"), shape, layout).components[reduced] == narrow
    plan = plan_memory(build("sft"), LlamaConfig(**FEW_LAYERS), layout)
    temporary = {name: plan.components[name] for names in plan.phases.values() for name in names}
    assert plan.peaks["backward pass"] == plan.peaks["optimizer step"] - temporary.pop(UPDATE) + sum(temporary.values())
    assert {KEPT, reduced, "bucket in which gradients are reduced", LOGITS} < {*temporary}


def test_tied_embeddings_trained_beside_adapter_count_once(build) -> None:
    config = build("lora", lora_modules_to_save="[lm_head]")
    shape = LlamaConfig(**FEW_LAYERS, tie_word_embeddings=True)
    adapted = add_adapter(AutoModelForCausalLM.from_config(shape), config.adapter, seed=0)
    size = sum(parameter.nbytes for parameter in adapted.parameters() if parameter.requires_grad)
    assert plan_memory(config, shape, SINGLE).components["model, gradients"] == size


@pytest.mark.parametrize(
    ("recipe", "keys"), [("dpo", {}), ("grpo", {"reward_funcs": ["a.b:c"], "response_length": 8, "beta": 0.1})]
)
def test_offloaded_states_are_in_host_memory(build, recipe, keys) -> None:
    """With FSDP2, those of all models; the processes share them."""
    config, model = build(recipe, **keys), LlamaConfig(**FEW_LAYERS)
    whole = plan_memory(config, model, Layout("single_gpu")).components
    size = sum(size for name, size in whole.items() if name.rpartition(", ")[2] in KINDS)
    plan = plan_memory(config, model, Layout("fsdp2_offload", 4, Held(0, 0, 0)))
    assert plan.host_bytes == size // 4
    lines = [*plan.describe({"GPU": 80e9})]
    assert lines[0] == (
        "accelerate_configs/fsdp2_offload.yaml: the layers in use on each process; "
        "on the host weights, gradients, optimizer states"
    )
    assert f"    host memory of each process: {size / 4e9:.2f} GB" in lines


def test_tensor_parallelism_shards_all_weights_except_norms(plan_pretraining, num_parameters) -> None:
    components = plan_pretraining(Layout("", tensor=2), activation_checkpointing=False)
    norms = 5 * 64
    assert components["model, weights"] == 4 * ((num_parameters - norms) // 2 + norms)
    # Activations outside of attention and MLP are replicated.
    whole = plan_pretraining(Layout(""), activation_checkpointing=False)[KEPT]
    assert whole / 2 < components[KEPT] < whole


def test_padding_token_may_be_in_part_of_another_tensor_parallel_rank(build) -> None:
    shape = LlamaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, pad_token_id=511)
    assert plan_memory(build("pretrain", max_steps=4), shape, Layout("", tensor=2)).peak > 0


def test_pipeline_stage_has_its_layers_and_one_embedding(plan_pretraining, num_parameters) -> None:
    whole, stage = (plan_pretraining(Layout("", pipeline_stages=stages, in_flight=stages)) for stages in (1, 2))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    # A stage has either the embedding or the projection of 512 tokens.
    assert stage["model, weights"] == whole["model, weights"] - 4 * (layer + 512 * 64)
    # As many micro-batches as stages, each with its share of layers: inputs of all layers, and one recomputed.
    kept = [components[KEPT] for components in (whole, stage)]
    assert kept[0] <= kept[1] < 2 * kept[0]
    sharded = plan_pretraining(Layout("", 4, Held(4, 4, 4), pipeline_stages=2, in_flight=2))
    assert sharded[GATHERED] == 2 * stage["model, weights"] // 4


def test_context_parallel_ranks_keep_their_tokens_and_gathered_keys(plan_pretraining) -> None:
    shards = Held(4, 4, 4)
    whole, by_heads, gathering = (
        plan_pretraining(Layout("", 4, shards, context=context, gathers_keys=gathers), activation_checkpointing=False)
        for context, gathers in ((1, False), (4, False), (4, True))
    )
    name = "activations of a micro-batch"
    assert by_heads[name] == gathering[name] == pytest.approx(whole[name] / 4, rel=0.1)
    # 2 rows of 48 more tokens, 2 key-value heads of 16, in 16 bits in each of 2 layers.
    assert gathering["keys and values of the other ranks' tokens"] == 2 * (2 * 48) * (2 * 16) * 2 * 2
    assert "keys and values of the other ranks' tokens" not in by_heads


class Loss:
    """Inputs of a vocabulary loss, far smaller than its logits."""

    num_tokens, vocabulary, width = 512, 2048, 4

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(self.num_tokens, self.width, generator=generator, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(self.vocabulary, self.width, generator=generator, requires_grad=True)
        self.targets = torch.randint(0, self.vocabulary, (self.num_tokens,), generator=generator)

    def compute(self, recipe: str, **options: Any) -> Tensor:
        if recipe == "sft":
            return compute_cross_entropy(self.hidden, self.weight, self.targets, **options).nll_sum
        if recipe in ("dpo", "grpo"):
            with_statistics = recipe == "grpo"
            return compute_token_logps(
                self.hidden, self.weight, self.targets, with_statistics=with_statistics, **options
            ).logps.sum()
        teacher = TeacherHead(self.hidden.detach(), self.weight.detach(), options)
        source: TeacherHead | TopLogps = teacher
        beta = 0.5 if recipe == "distill mixture" else 0.0
        if recipe == "distill stored":
            ids = torch.arange(4).expand(self.num_tokens, -1)
            logps = torch.full((self.num_tokens, 4), -2.0)
            source = TopLogps(ids, logps, logps[:, 0], logps[:, 0], self.vocabulary)
        targets = DistillationTargets(self.targets, source, Objective(beta=beta))
        return compute_distillation(self.hidden, self.weight, targets, **options).loss_sum


DISTILLED = {"teacher_model_name_or_path": "owner/teacher"}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("sft", {}),
        ("dpo", {}),
        ("grpo", {"reward_funcs": ["builtins:len"], "response_length": 8}),
        ("distill", DISTILLED),
        ("distill mixture", DISTILLED | {"distillation_beta": 0.5}),
        ("distill stored", DISTILLED | {"teacher_top_k": 4}),
    ],
)
def test_logit_bytes_match_allocations_of_losses(recipe, keys, is_half, softcap) -> None:
    config = build_config(recipe.split()[0], bf16=is_half, **keys)
    loss = Loss(torch.bfloat16 if is_half else torch.float32)
    options = {} if softcap is None else {"softcap": softcap}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half), LiveTensors() as live:
        loss.compute(recipe, **options).backward()
    counted = live.peak / loss.num_tokens / loss.vocabulary
    shape = LlamaConfig(final_logit_softcapping=softcap)
    assert counted == pytest.approx(count_logit_bytes(config, shape), rel=0.05)


def test_sequential_recurrence_is_counted_from_few_tokens(build, passes, monkeypatch) -> None:
    """Equal to the count of all tokens, which would take minutes for long rows."""
    config, model = build("sft", max_length=20), RwkvConfig(vocab_size=160, hidden_size=64, num_hidden_layers=3)
    monkeypatch.setattr(memory, "_PROBED", (4, 8))
    found = count_kept(config, model, SINGLE)
    assert [length for _, length, _ in passes] == [4, 8]
    monkeypatch.setattr(memory, "_FOUND", {})
    monkeypatch.setattr(memory, "_count_tokens", lambda count, batch: count(batch))
    assert found == count_kept(config, model, SINGLE)


SOFT_CAPPED = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}


def test_model_with_capped_attention_logits_is_planned(build, monkeypatch) -> None:
    """Without a kernel that caps them, training is eager; such a kernel saves as much as one without a cap."""
    model = Gemma2Config(**SOFT_CAPPED, num_attention_heads=4, num_key_value_heads=2, attn_logit_softcapping=50.0)
    config = build("sft", max_length=256)
    assert count_kept(config, model, SINGLE) == count_kept(
        build("sft", max_length=256, attn_implementation="eager"), model, SINGLE
    )
    monkeypatch.setattr(memory, "find_refusals", lambda *_: {"eager": None, "flash_attention_2": None})
    capped = count_kept(config, model, SINGLE)
    model.attn_logit_softcapping = None
    assert capped == count_kept(config, model, SINGLE)


@pytest.mark.parametrize("model", [FalconConfig(**FEW_LAYERS), GPTJConfig(**FEW_LAYERS, rotary_dim=8)])
def test_model_with_own_attention_classes_is_planned(build, model) -> None:
    config = build("sft", attn_implementation="sdpa")
    assert max(layer.total for layer in count_kept(config, model, SINGLE).layers) >= 2 * 4 * 64 * 64


def test_architecture_that_cannot_be_counted_raises_with_reason(build) -> None:
    with pytest.raises(ConfigError, match=r"a ctrl model .*no layers that support"):
        plan_memory(build("sft"), CTRLConfig(**FEW_LAYERS), SHARDED)

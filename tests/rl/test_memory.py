"""Planned memory of PPO and its engines, compared with real models and closed forms."""

from __future__ import annotations

import dataclasses
import re
import weakref
from pathlib import Path

import pytest
import torch
from tests.live_tensors import LiveTensors
from tests.models.test_generation import build_sampling
from tests.rl import keys_task
from tests.rl.reward_adapters import write_reward_adapter
from tests.rl.reward_models import write_reward_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig

from recipes_lib.config.loader import load_config
from recipes_lib.models.generation import SampleByUniforms
from recipes_lib.models.loading import load_model_config
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import COMMUNICATION, CONTEXT, RESERVE, SAMPLING_BYTES, Held, Layout
from recipes_lib.rl.rewards import load_rewards

ROWS = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "max_length": 24, "response_length": 8}
LAYOUTS = {
    "separate_models": {},
    "adapters_16_bit": {"use_peft": True, "lora_r": 5, "dtype": "bfloat16"},
    "adapters_shared_reward": {"use_peft": True, "lora_r": 5, "use_dora": True},
}


@pytest.fixture
def configure(policy_dir, prompts_file, tmp_path):
    def configure(name, **keys):
        reward = tmp_path / "reward"
        if name == "adapters_shared_reward":
            write_reward_adapter(policy_dir, reward)
        else:
            write_reward_model(reward, policy_dir)
        keys = {**ROWS, **LAYOUTS[name], "reward_model_name_or_path": reward, **keys}
        return load_config("ppo", keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))

    return configure


KINDS = (", weights", ", gradients", ", optimizer states")


def shard_by(number):
    return Layout("", number, Held(number, number, number))


def plan(config, num_shards=1, is_half=False):
    config = config.with_training({"bf16": is_half})
    return plan_memory(config, load_model_config(config.model)[0], shard_by(num_shards))


def load(config):
    models = keys_task.load(config).models
    return models, load_rewards(config.rewards, "cpu", models.reward)


def count(tensors):
    return sum(
        storage.nbytes() for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values()
    )


def total(terms, kind):
    return sum(size for name, size in terms.items() if name.endswith(kind))


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_weights_gradients_and_states_match_loaded_models(configure, name):
    config = configure(name)
    models, rewards = load(config)
    held = (models.policy, models.critic, models.own_reference, rewards.model.model)
    everything = [t for module in held if module is not None for t in (*module.parameters(), *module.buffers())]
    terms = plan(config).components
    # Rotary embeddings register their frequencies twice, and each adapted layer has a scalar buffer.
    assert total(terms, ", weights") == pytest.approx(count(everything), rel=2e-3)
    trained = {"policy": models.policy_parameters(), "critic": models.critic_parameters()}
    for learner, parameters in trained.items():
        assert terms[f"{learner}, gradients"] == count(parameters.values())
        optimizer = torch.optim.AdamW(parameters.values())
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert terms[f"{learner}, optimizer states"] == count(moments)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_half", [False, True], ids=["single", "half"])
def test_planned_activations_and_cache_match_real_passes(configure, name, is_half):
    config = configure(name)
    models, _ = load(config)
    rows, length, answer = 3, 24, 8
    own = {p.untyped_storage().data_ptr() for p in models.policy.parameters()}
    kept = []

    def keep(tensor):
        # A view, so that only tensors that the graph holds to the end stay alive.
        held = tensor.view_as(tensor)
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(weakref.ref(held))
        return held

    places = torch.arange(rows * length).view(rows, length)[:, -answer - 1 : -1].flatten()
    inputs = {"input_ids": torch.randint(2, 30, (rows, length)), "position_ids": torch.arange(length).expand(rows, -1)}
    inputs |= {"predictors": places, "targets": torch.randint(2, 30, (rows * answer,))}
    models.set_training(training=True)
    precision = torch.autocast("cpu", torch.bfloat16, enabled=is_half)
    with models.using("policy") as policy, precision, saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy(**inputs, with_statistics=True, token_logps=True)
    assert output.logps.requires_grad
    terms = plan(config, is_half=is_half).components
    planned = terms["activations of a micro-batch"] + terms.get("16-bit copies of the weights in a pass", 0)
    # Autocast caches copies of all adapter weights, of which the graph holds some.
    tolerance = 0.07 if is_half and name != "separate_models" else 0.02
    assert planned == pytest.approx(count([t for t in (held() for held in kept) if t is not None]), rel=tolerance)

    with torch.no_grad(), models.using("policy") as policy, precision:
        cache = policy(input_ids=torch.randint(2, 30, (5, length)), use_cache=True).past_key_values
    assert terms["KV cache of a batch"] == count([t for layer in cache.layers for t in (layer.keys, layer.values)])


def test_checkpointing_keeps_layer_inputs_and_one_layer(configure):
    config = configure("separate_models")
    kept = plan(config).components["activations of a micro-batch"]
    recomputed = plan(configure("separate_models", activation_checkpointing=True)).components[
        "activations of a micro-batch"
    ]
    hidden = 3 * 24 * 64 * 4
    layer = plan(configure("separate_models", per_device_eval_batch_size=3)).components["a layer of a batch"]
    # The first layer also holds the rotary table.
    assert kept - recomputed == pytest.approx(2 * layer - (2 * hidden + layer), rel=0.02)


def test_phase_peaks_are_sums_of_components(configure):
    config = configure("separate_models")
    alone, shared = plan(config), plan(config, num_shards=4)
    weights, states = (total(alone.components, kind) for kind in (", weights", ", optimizer states"))
    terms = alone.components
    always = terms[CONTEXT] + terms[RESERVE]
    expected = weights + states + terms["critic, gradients"] + terms["activations of a micro-batch"] + always
    assert alone.peaks["critic's update"] == expected
    batch = terms["KV cache of a batch"] + terms["logits of a batch"] + terms["a layer of a batch"]
    assert alone.peaks["sampling"] == weights + states + batch + always
    always = sum(shared.components[name] for name in (CONTEXT, COMMUNICATION, RESERVE))
    assert shared.peaks["sampling"] - always == pytest.approx(
        (weights + states) / 4 + batch + terms["policy, weights"], rel=1e-3
    )
    # Gradients of a layer before they are reduced, with their copy in one tensor, and of the output projection.
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert shared.components["gradients before they are reduced"] == (4 + 4) * layer + 4 * 32 * 64
    # Gathered in the compute dtype: the policy for sampling, two layers and the projection for forward passes.
    narrow = plan(config, num_shards=4, is_half=True).components
    assert narrow["gathered for sampling"] * 2 == shared.components["gathered for sampling"]
    assert shared.components["gathered for a layer"] == 4 * (2 * layer + 32 * 64)
    assert alone.peak == max(alone.peaks.values())
    assert alone.fits(alone.peak)
    assert not alone.fits(0.99 * alone.peak)


def test_missing_reward_model_is_planned_like_the_policy(configure, tmp_path):
    config = configure("separate_models")
    present = plan(config).components
    absent = configure("separate_models", reward_model_name_or_path="runs/not-yet")
    assert plan(absent).components == present
    without = configure(
        "separate_models", reward_model_name_or_path="null", critic_model_name_or_path=tmp_path / "reward"
    )
    assert plan(without).components == {
        name: size if name != RESERVE else plan(without).components[RESERVE]
        for name, size in present.items()
        if "reward" not in name
    }


def test_kl_coef_of_zero_plans_no_reference(configure):
    assert "reference, weights" in plan(configure("separate_models")).components
    assert "reference, weights" not in plan(configure("separate_models", kl_coef=0)).components


def test_sampling_bytes_per_logit_match_allocations():
    scores = torch.randn(8, 20_000)
    sample = SampleByUniforms(torch.rand(8, 1, dtype=torch.float64), build_sampling(0.7))
    with LiveTensors() as live:
        sample(torch.zeros(8, 1), scores)
    assert live.peak / scores.numel() == pytest.approx(SAMPLING_BYTES - 4, rel=0.02)


LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def shipped():
    """Plans of the shipped run: four models, alone and sharded by 8; adapters, also with a shared reward model."""
    config = load_config("ppo", ["--config", "recipes/configs/llama3-8b/ppo.yaml"])
    whole = dataclasses.replace(
        config,
        adapter=dataclasses.replace(config.adapter, use_peft=False),
        model=dataclasses.replace(config.model, dtype="float32"),
    )
    runs = [(whole, 1), (whole, 8), (config, 1)]
    plans = [plan_memory(run, LLAMA_3_8B, shard_by(number)) for run, number in runs]
    adapters = plans[-1].components
    on_base = {**adapters, "reward model, weights": adapters["critic, weights"]}
    return [*plans, dataclasses.replace(plans[-1], components=on_base)]


def test_llama_3_8b_matches_closed_forms(shipped):
    whole, counted = shipped[0].components, shipped[2].components
    size = 8_030_261_248
    assert whole["policy, weights"] == pytest.approx(4 * size, rel=1e-6)
    assert whole["policy, optimizer states"] == pytest.approx(8 * size, rel=1e-6)
    assert whole["critic, gradients"] == pytest.approx(4 * (size - 128256 * 4096), rel=1e-6)
    # Rank 64 in q, k, v, o, gate, up and down of 32 layers.
    adapter = 4 * 64 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert counted["policy, weights"] == pytest.approx(2 * size + adapter, rel=1e-6)
    assert counted["policy, gradients"] == adapter
    assert counted["policy, optimizer states"] == 2 * adapter
    assert counted["critic, weights"] == adapter + 4 * 4097
    assert counted["KV cache of a batch"] == 32 * 1536 * 32 * 2 * 8 * 128 * 2
    assert "reference, weights" not in counted


def test_table_in_ppo_docs_matches_plans(shipped):
    page = (Path(__file__).parents[2] / "docs" / "ppo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:four models, `|the same, |adapters, ).*?((?: \| [\d.]+){6}) \|$", page, re.MULTILINE)
    for planned, row in zip(shipped, rows, strict=True):
        weights, gradients, states = (total(planned.components, kind) for kind in KINDS)
        passes = [planned.peaks[name] for name in ("reading", "policy's update", "critic's update")]
        written = [float(number) for number in row.split(" | ")[1:]]
        # transformers 5.24 has a smaller cache of keys and values than 5.23.
        assert written.pop(2) == pytest.approx(planned.peaks["sampling"] / 1e9, rel=0.02)
        assert written == pytest.approx([size / 1e9 for size in (weights, states + gradients, *passes)], abs=0.051)


def test_colocated_engine_holds_its_share_unless_asleep(configure):
    device = 1e10
    alone = plan(configure("separate_models", use_vllm=True), is_half=True).place(device)
    asleep = plan(configure("separate_models", use_vllm=True, vllm_enable_sleep_mode=True), is_half=True).place(device)
    server = plan(configure("separate_models", use_vllm=True, vllm_mode="server"), is_half=True).place(device)
    usual = plan(configure("separate_models"), is_half=True).place(device)
    policy, _ = load(configure("separate_models"))
    weights = sum(parameter.numel() for parameter in policy.policy.parameters()) * 2
    assert alone.components["vLLM's weights"] == weights
    assert alone.components["vLLM's KV cache"] == round(0.3 * device) - weights
    reserve = "fragmentation reserve"
    peaks = [
        {phase: size - planned.components[reserve] for phase, size in planned.peaks.items()}
        for planned in (alone, asleep, server, usual)
    ]
    for phase, size in peaks[2].items():
        assert peaks[0][phase] == size + round(0.3 * device)
        assert peaks[1][phase] == size + (round(0.3 * device) if phase == "sampling" else 0)
        assert (size < peaks[3][phase]) == (phase == "sampling")
    # The share is that of the device; an engine without memory for one row does not fit.
    smaller = alone.place(device / 2)
    assert smaller.components["vLLM's KV cache"] == round(0.15 * device) - weights
    assert alone.fits(device)
    assert not dataclasses.replace(alone, engine_share=1e-9).fits(device)
    assert not dataclasses.replace(alone, engine_share=0.95).fits(device)
    assert any("vllm_gpu_memory_utilization x GPU" in line for line in alone.describe({"10 GB": device}, explains=True))


def test_vllm_needs_no_gathered_policy_under_sharding(configure):
    sharded = plan(configure("separate_models", use_vllm=True, vllm_mode="server"), num_shards=8, is_half=True)
    assert sharded.components["gathered for a layer"] > 0
    assert "gathered for a layer" in sharded.phases["sampling"]
    assert "gathered for sampling" not in sharded.components
    assert "gathered for sampling" in plan(configure("separate_models"), num_shards=8, is_half=True).components


def test_continuous_batching_copies_weights_if_compute_dtype_differs(configure):
    keys = {"use_transformers_continuous_batching": True}
    plans = [
        plan(configure(name, **keys), is_half=is_half)
        for name, is_half in (("separate_models", True), ("separate_models", False))
    ]
    weights = plans[0].components["policy, weights"]
    assert plans[0].components["16-bit copy that answers"] == weights // 2
    assert "16-bit copy that answers" not in plans[1].components
    assert "16-bit copy that answers" not in plan(configure("adapters_16_bit", **keys), is_half=True).components

"""Estimated duration of RL iterations, compared with roofline closed forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.planning.runs import build_config
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config

from recipes_lib.planning.compute import compute_flops_per_token, compute_model_size
from recipes_lib.planning.devices import Device, choose_device
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.timing import Iteration, estimate_iteration, list_readers

SIZES = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
SHAPE = LlamaConfig(**SIZES, num_attention_heads=16, num_key_value_heads=4)
EXPERTS = MixtralConfig(**SIZES, num_attention_heads=16, num_key_value_heads=4)
VLLM = {"use_vllm": True}
DEVICE = choose_device("H100")
PEAK = 0.3 * 989e12


def estimate(
    recipe: str = "grpo",
    answers: int = 64,
    passes: int = 1,
    gpus: int = 1,
    layout: Layout | None = None,
    device: Device = DEVICE,
    shape: PretrainedConfig = SHAPE,
    **keys: Any,
) -> Iteration:
    defaults = {
        "reward_funcs": '["a.b:c"]',
        "max_length": 768,
        "response_length": 512,
        "per_device_eval_batch_size": 32,
    }
    config = build_config(recipe, **defaults | {"activation_checkpointing": False} | keys)
    return estimate_iteration(config, shape, answers, passes, layout or Layout("ddp", gpus), device, 0.3)


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS])
def test_engine_decoding_is_bound_by_memory_bandwidth(shape: PretrainedConfig) -> None:
    """A batch of answers selects all experts, so that all weights are read."""
    found = estimate(shape=shape, **VLLM)
    # 2-byte keys and values of 8 layers, 4 heads of 64, and on average 256 + 512 / 2 tokens.
    rows = 64 * 2 * 8 * 4 * 64 * 2 * (256 + 512 / 2)
    decoding = 512 * (2 * compute_model_size(shape).total + rows) / 3.35e12
    flops = compute_flops_per_token(shape, 768)
    # A prompt is read for the logits of its last token.
    prefill = 64 * (256 * flops.body + flops.head) / 3 / PEAK
    assert (*found.lengths, found.decoding.batch, found.decoding.num_batches) == (256, 512, 64, 1)
    assert found.sampling == pytest.approx(decoding + prefill, rel=1e-3)


def test_single_answer_reads_selected_experts_only() -> None:
    slow = dataclasses.replace(DEVICE, bandwidth=1e6)
    found, size = estimate(answers=1, shape=EXPERTS, device=slow, **VLLM), compute_model_size(EXPERTS)
    rows = 2 * 8 * 4 * 64 * 2 * (256 + 512 / 2)
    assert size.active < size.total / 2
    assert found.sampling == pytest.approx(512 * (2 * size.active + rows) / 1e6, rel=1e-3)


def test_decoding_reads_keys_within_sliding_windows() -> None:
    """Half of the layers read 64 keys, the others all of on average 256 + 512 / 2."""
    sizes = SIZES | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 64}
    kinds = ["sliding_attention", "full_attention"] * 4
    slow, windowed = (
        dataclasses.replace(DEVICE, bandwidth=1e6),
        Qwen2Config(**sizes, use_sliding_window=True, layer_types=kinds),
    )
    whole, part = (estimate(device=slow, shape=shape, **VLLM).sampling for shape in (Qwen2Config(**sizes), windowed))
    saved = 64 * 4 * 2 * 4 * 64 * 2 * (256 + 512 / 2 - 64)
    assert whole - part == pytest.approx(512 * saved / 1e6, rel=1e-3)


def test_vllm_reads_latents_of_latent_attention() -> None:
    """8 layers of 2-byte latents, 512 and 64 features, where transformers reads 16 heads of 192 and 128."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    shape, slow = DeepseekV3Config(**SIZES, **sizes), dataclasses.replace(DEVICE, bandwidth=1e6)
    rows = {"use_vllm": 8 * (512 + 64), "use_transformers_continuous_batching": 8 * 16 * (192 + 128)}
    for engine, row in rows.items():
        read = 2 * compute_model_size(shape).total + 64 * 2 * row * (256 + 512 / 2)
        found = estimate(shape=shape, device=slow, **{engine: True})
        assert found.sampling == pytest.approx(512 * read / 1e6, rel=1e-3)


def test_generate_is_bound_by_host_and_batches_are_sequential() -> None:
    one, two = (estimate(answers=answers) for answers in (32, 64))
    assert two.decoding.num_batches == 2 * one.decoding.num_batches == 2
    assert estimate(use_transformers_continuous_batching=True).decoding.num_batches == 1
    assert two.sampling == pytest.approx(2 * one.sampling)
    assert one.sampling > 512 * 8 / 32 / 25.5 > estimate(answers=32, **VLLM).sampling
    assert estimate(answers=64, gpus=2).sampling == pytest.approx(one.sampling)


def test_updates_scale_with_epochs_and_scoring_with_models() -> None:
    once, twice = estimate(beta=0), estimate(passes=2, beta=0.1)
    # Forward and backward cost three forward passes; a reference adds one.
    assert once.updates == pytest.approx(3 * once.scoring)
    assert (twice.updates, twice.scoring) == pytest.approx((2 * once.updates, 2 * once.scoring))
    ppo = estimate("ppo")
    assert (ppo.updates, ppo.scoring) == pytest.approx((2 * once.updates, 3 * once.scoring))


@pytest.mark.parametrize("use_peft", [False, True])
def test_logits_are_those_of_answers_alone(use_peft: bool) -> None:
    found, flops = (
        estimate(use_peft=use_peft),
        [compute_flops_per_token(SHAPE, 768, is_frozen=is_frozen) for is_frozen in (False, use_peft)],
    )
    forward, update = (64 * (768 * each.body + 512 * each.head) / PEAK for each in flops)
    assert (found.scoring, found.updates) == pytest.approx((forward / 3, update))


def test_recomputation_affects_updates_only() -> None:
    plain, recomputed = estimate(), estimate(activation_checkpointing=True)
    # At equal MFU of updates, forward passes are faster by the recomputed pass.
    assert recomputed.updates == plain.updates
    assert recomputed.scoring == pytest.approx(plain.scoring * 3 / 4)


def test_asynchronous_server_overlaps_sampling_with_updates() -> None:
    found = estimate(use_vllm=True, vllm_mode="server", max_staleness=1)
    assert found.seconds == max(found.sampling, found.scoring + found.updates)
    assert found._replace(is_overlapped=False).seconds > found.seconds


SLOW = dataclasses.replace(DEVICE, link=1e6)
"""A device whose link is the bottleneck."""
SHARDED = Layout("fsdp2", 2, Held(2, 2, 2))


def test_slow_link_bounds_updates_and_scoring() -> None:
    size = compute_model_size(SHAPE).total
    keys = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1, **VLLM}
    fast = estimate(gpus=2, **keys)
    whole, shared = (estimate(layout=layout, device=SLOW, **keys) for layout in (Layout("ddp", 2), SHARDED))
    # 64 answers in steps of 2 x 4 x 2: four all-reduces of 32-bit gradients; on two ranks each sends its size.
    assert whole.updates == pytest.approx(4 * 4 * size / 1e6)
    assert (whole.sampling, whole.scoring) == (fast.sampling, fast.scoring)
    # Each of two micro-batches gathers half of the 16-bit weights twice and reduces half of the gradients.
    assert shared.updates == pytest.approx(4 * 2 * (2 + 2) * size / 1e6)
    # Policy and reference are gathered for the one batch of a GPU, the policy also once for sampling.
    assert shared.scoring == pytest.approx(2 * size / 1e6)
    assert shared.sampling == pytest.approx(fast.sampling + size / 1e6)
    # NVLink hides all traffic except gathering before sampling.
    near = estimate(layout=SHARDED, **keys)
    assert (near.updates, near.scoring) == (fast.updates, fast.scoring)
    # Offloading adds host traffic to each step.
    assert estimate(layout=dataclasses.replace(SHARDED, shards=Held(0, 0, 0)), **keys).updates > near.updates


def test_readers_are_models_with_forward_passes() -> None:
    assert list_readers(build_config("grpo", reward_funcs="[a.b:c]", beta=0)) == ["policy"]
    assert list_readers(build_config("ppo", reward_funcs="[a.b:c]")) == ["policy", "critic", "reference"]
    assert list_readers(build_config("ppo", reward_funcs="[a.b:c]", kl_coef=0)) == ["policy", "critic"]

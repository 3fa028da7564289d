"""An iteration takes what rooflines say, by engine, answers, passes and models; it is an estimate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.planning.runs import build_config
from transformers import LlamaConfig

from recipes_lib.planning.compute import compute_model_size
from recipes_lib.planning.devices import Device, choose_device
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.rollouts import Iteration, estimate_iteration, list_readers

SIZES = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
SHAPE = LlamaConfig(**SIZES, num_attention_heads=16, num_key_value_heads=4)
VLLM = {"use_vllm": True}
DEVICE = choose_device("H100")


def estimate(
    recipe: str = "grpo",
    answers: int = 64,
    passes: int = 1,
    gpus: int = 1,
    layout: Layout | None = None,
    device: Device = DEVICE,
    **keys: Any,
) -> Iteration:
    usual = {"reward_funcs": '["a.b:c"]', "max_length": 768, "response_length": 512, "per_device_eval_batch_size": 32}
    config = build_config(recipe, **usual | {"activation_checkpointing": False} | keys)
    return estimate_iteration(config, SHAPE, answers, passes, layout or Layout("ddp", gpus), device, 989e12, 0.3)


def test_an_engine_reads_weights_and_keys_at_the_bandwidth_of_the_memory() -> None:
    found = estimate(**VLLM)
    # Keys and values of 8 layers, 4 heads of 64, in 2 bytes, over a row of 256 + 512 / 2 tokens on average.
    rows = 64 * 2 * 8 * 4 * 64 * 2 * (256 + 512 / 2)
    decoding = 512 * (2 * compute_model_size(SHAPE).total + rows) / 3.35e12
    prefill = found.scoring * 256 / 768
    assert (found.prompt, found.answer, found.batch, found.num_batches) == (256, 512, 64, 1)
    assert found.sampling == pytest.approx(decoding + prefill, rel=1e-3)


def test_generate_waits_for_the_host_batch_by_batch() -> None:
    one, two = (estimate(answers=answers) for answers in (32, 64))
    assert two.num_batches == 2 * one.num_batches == 2
    assert two.sampling == pytest.approx(2 * one.sampling)
    assert one.sampling > 512 * 8 / 32 / 25.5 > estimate(answers=32, **VLLM).sampling
    assert estimate(answers=64, gpus=2).sampling == pytest.approx(one.sampling)


def test_passes_and_models_are_learnt_from_and_read() -> None:
    once, twice = estimate(beta=0), estimate(passes=2, beta=0.1)
    # Forward and backward are three passes of one; a reference is read as the policy is.
    assert once.updates == pytest.approx(3 * once.scoring)
    assert (twice.updates, twice.scoring) == pytest.approx((2 * once.updates, 2 * once.scoring))
    ppo = estimate("ppo")
    assert (ppo.updates, ppo.scoring) == pytest.approx((2 * once.updates, 3 * once.scoring))


def test_recomputation_is_of_updates_alone_whose_share_it_lowers() -> None:
    plain, recomputed = estimate(), estimate(activation_checkpointing=True)
    # At the same share of training, reading has none of what is repeated.
    assert recomputed.updates == plain.updates
    assert recomputed.scoring == pytest.approx(plain.scoring * 3 / 4)


def test_a_server_that_is_ahead_samples_during_the_updates() -> None:
    found = estimate(use_vllm=True, vllm_mode="server", max_staleness=1)
    assert found.seconds == max(found.sampling, found.scoring + found.updates)
    assert dataclasses.replace(found, is_overlapped=False).seconds > found.seconds


SLOW = dataclasses.replace(DEVICE, link=1e6)
"""Traffic over it takes longer than anything else."""
SHARED = Layout("fsdp2", 2, Held(2, 2, 2))


def test_an_iteration_waits_for_traffic_that_takes_longer_than_its_products() -> None:
    size = compute_model_size(SHAPE).total
    keys = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1, **VLLM}
    fast = estimate(gpus=2, **keys)
    whole, shared = (estimate(layout=layout, device=SLOW, **keys) for layout in (Layout("ddp", 2), SHARED))
    # 64 answers by steps of 2 x 4 x 2: four all-reduces of 32-bit gradients, each sends its size on two ranks.
    assert whole.updates == pytest.approx(4 * 4 * size / 1e6)
    assert (whole.sampling, whole.scoring) == (fast.sampling, fast.scoring)
    # Each of two micro-batches gathers half of the 16-bit weights twice and reduces half of the gradients.
    assert shared.updates == pytest.approx(4 * 2 * (2 + 2) * size / 1e6)
    # Policy and reference are gathered for the one batch that a GPU reads, the policy once to be sampled from.
    assert shared.scoring == pytest.approx(2 * size / 1e6)
    assert shared.sampling == pytest.approx(fast.sampling + size / 1e6)
    # By NVLink all of it is hidden but the gathering before sampling.
    near = estimate(layout=SHARED, **keys)
    assert (near.updates, near.scoring) == (fast.updates, fast.scoring)
    # What the host keeps travels to it in every step.
    assert estimate(layout=dataclasses.replace(SHARED, shards=Held(0, 0, 0)), **keys).updates > near.updates


def test_the_models_that_read_answers_are_named() -> None:
    assert list_readers(build_config("grpo", reward_funcs="[a.b:c]", beta=0)) == ["policy"]
    assert list_readers(build_config("ppo", reward_funcs="[a.b:c]")) == ["policy", "critic", "reference"]

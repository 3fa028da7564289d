"""Estimated sampling of on-policy distillation, compared with closed forms; RL's is in ``test_timing.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.planning.runs import build_config
from transformers import LlamaConfig

from recipes_lib.planning.compute import compute_flops_per_token, compute_model_size
from recipes_lib.planning.devices import Device, choose_device
from recipes_lib.planning.timing import Decoding, estimate_on_policy

SHAPE = LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
)
ON_POLICY: dict[str, Any] = {
    "teacher_model_name_or_path": "a/t",
    "max_length": 1024,
    "lmbda": 1.0,
    "response_length": 128,
    "per_device_eval_batch_size": 4,
}
H100 = choose_device("H100")


def estimate(device: Device = H100, **keys: Any) -> Decoding:
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "activation_checkpointing": False}
    return estimate_on_policy(build_config("distill", **ON_POLICY | batch | keys), SHAPE, device, 0.3)


def test_full_rows_are_answered_in_batches_bound_by_the_host() -> None:
    found = estimate()
    # Four documents of 128 + 128 tokens in each of two packed rows; 25.5 tokens/s of 32 layers.
    assert found[1:] == (8, 4, 2)
    flops = compute_flops_per_token(SHAPE, 256)
    prompts = 8 * (128 * flops.body + flops.head) / 3 / (0.3 * 989e12)
    assert found.seconds == pytest.approx(2 * 128 * 8 / 32 / 25.5 + prompts)
    # Micro-batches are answered one after the other.
    halves = estimate(per_device_train_batch_size=1, gradient_accumulation_steps=2)
    assert (halves[1:], halves.seconds) == (found[1:], pytest.approx(found.seconds))
    assert estimate(per_device_train_batch_size=1, gradient_accumulation_steps=2, packing=False)[1:] == (2, 1, 2)
    assert estimate(packing=False)[1:] == (2, 2, 1)
    assert estimate(response_length=800)[1:] == (2, 2, 1)


def test_slow_memory_bounds_decoding() -> None:
    slow = dataclasses.replace(H100, bandwidth=1e6)
    # 2-byte weights, and 2-byte keys and values of 8 layers, 16 heads of 64 and on average 128 + 64 tokens.
    cache = 4 * 2 * 2 * 8 * 16 * 64 * (128 + 64)
    decoding = 2 * 128 * (2 * compute_model_size(SHAPE).total + cache) / 1e6
    assert estimate(device=slow).seconds == pytest.approx(decoding, rel=1e-3)

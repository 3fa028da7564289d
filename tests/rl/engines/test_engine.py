"""Which engine answers, and what is said and done when its log-probabilities are not the policy's."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tests.models.test_generation import build_sampling
from tests.rl import keys_task
from tests.rl.test_rollout import CPU, build_rollout
from tests.rows import read_events

from recipes_lib.config.schema import EngineConfig
from recipes_lib.errors import ConfigError, DivergedError
from recipes_lib.models.generation import GenerateBackend
from recipes_lib.rl.engines import vllm_colocated
from recipes_lib.rl.engines.engine import ContinuousBatchingBackend, build_generator, verify_engine

ARGS = SimpleNamespace(
    per_device_eval_batch_size=4, device=CPU, process_index=0, bf16=False, fp16=False, mixed_precision="no"
)
EXACT, OTHER = SimpleNamespace(name="exact", follows_seed=True), SimpleNamespace(name="other", follows_seed=False)


def build(**keys):
    config = SimpleNamespace(engine=EngineConfig(**keys))
    return build_generator(config, ARGS, build_sampling(), precision=contextlib.nullcontext, max_length=32)


def test_the_engine_is_the_one_that_was_asked_for(monkeypatch):
    assert isinstance(build(), GenerateBackend)
    assert isinstance(build(use_transformers_continuous_batching=True), ContinuousBatchingBackend)
    for mode in ("colocate", "server"):
        with pytest.raises(ConfigError, match="vLLM is not installed"):
            build(use_vllm=True, vllm_mode=mode)
    monkeypatch.setattr(vllm_colocated, "start", lambda config, args, sampling, max_length: max_length)
    assert build(use_vllm=True) == 32


def test_an_engine_is_held_against_the_training_graph():
    rollout = build_rollout([(3, 5), (2, 2)])
    same = dataclasses.replace(rollout, engine_logps=rollout.logps)
    assert verify_engine(same, EXACT, torch.float32) == "exact and the policy differ by 0.0e+00 nats a token"
    # What stands behind an answer does not count.
    beyond = dataclasses.replace(same, engine_logps=same.engine_logps + 9.0 * ~same.mask)
    assert "0.0e+00" in verify_engine(beyond, EXACT, torch.float32)
    near = dataclasses.replace(rollout, engine_logps=rollout.logps + 0.01)
    assert "weighted by the ratio" in verify_engine(near, EXACT, torch.float32)
    assert "weighted" not in verify_engine(near, EXACT, torch.bfloat16)
    assert "do not follow from the seed" in verify_engine(same, OTHER, torch.float32)
    for wrong in (1.5, float("nan")):
        with pytest.raises(DivergedError, match="does not have the policy's weights"):
            verify_engine(dataclasses.replace(rollout, engine_logps=rollout.logps + wrong), EXACT, torch.bfloat16)


def test_a_run_with_another_engine_learns_from_answers_that_are_the_policys_own(policy_dir, prompts_file, tmp_path):
    keys = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": "{num_blocks: 64, page_size: 16, max_batch_tokens: 128}",
        "max_steps": 4,
        "per_device_train_batch_size": 8,
    }
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
    (event,) = read_events(tmp_path)
    assert abs(event["rollout/engine_mismatch_kl"]) < 1e-5
    assert event["rollout/is_weight_max"] == pytest.approx(1, abs=1e-4)
    assert event["policy/num_updates"] == 4
    assert event["time/sync"] >= 0

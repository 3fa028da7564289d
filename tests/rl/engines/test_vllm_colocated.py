"""Colocated vLLM backend with a fake engine; ``make test-vllm`` uses the real one."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tests.models.adapter_models import adapt
from tests.models.test_generation import PROMPTS, build_sampling, draw, measure_gap
from tests.rl import keys_task
from tests.rl.test_rollout import build_policy
from tests.rl.vllm_fake import FakeEngine, build_fake, colocated
from tests.rows import read_events
from transformers import LlamaForCausalLM

from recipes_lib.errors import ConfigError
from recipes_lib.stopping import StopPendingError


@pytest.fixture
def engine():
    """Fake engine with other weights than the policy's."""
    other = copy.deepcopy(build_policy("llama"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1)
    return FakeEngine(other)


@pytest.mark.parametrize(("temperature", "sleeps"), [(1.0, False), (0.7, True)])
def test_samples_with_current_weights_and_their_logps(engine, temperature, sleeps):
    policy, beats = build_policy("llama"), []
    backend = build_fake(engine, build_sampling(temperature, beat=lambda: beats.append(1)), sleeps=sleeps)
    for _ in range(2):
        backend.load(policy)
        prompts = [*PROMPTS, *PROMPTS[::-1]]
        answers = backend.generate(policy, prompts, draw(8))
        assert measure_gap(policy, prompts, answers, temperature) < 1e-5
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
    assert len(beats) == engine.num_steps
    once = ["wake weights", "reload", "reset", "wake kv_cache", "sleep"]
    assert engine.calls == (["sleep", *once, *once] if sleeps else ["reload", "reset"] * 2)


def test_adapter_is_merged_into_engine_weights(engine):
    policy = adapt(build_policy("llama"))
    backend = build_fake(engine, build_sampling())
    backend.load(policy)
    assert measure_gap(policy, PROMPTS, backend.generate(policy, PROMPTS, draw(4)), 1.0) < 1e-5


def test_seed_determines_answers_and_global_generators_are_preserved(engine):
    policy, backend = build_policy("llama"), build_fake(engine, build_sampling())
    backend.load(policy)
    before = torch.get_rng_state()
    first, again, other = (backend.generate(policy, PROMPTS, uniforms) for uniforms in (draw(4), draw(4), 1 - draw(4)))
    assert torch.equal(first.response_ids, again.response_ids)
    assert not torch.equal(first.response_ids, other.response_ids)
    assert torch.equal(before, torch.get_rng_state())


def test_stop_request_aborts_unfinished_requests(engine):
    def leave():
        raise StopPendingError

    backend = build_fake(engine, build_sampling(beat=leave, response_length=200, stop_ids=[99]))
    backend.load(build_policy("llama"))
    with pytest.raises(StopPendingError):
        backend.generate(None, PROMPTS, draw(4))
    assert engine.num_steps == 1
    assert not engine.has_unfinished_requests()


def test_engine_failure_error_says_how_to_resume(engine):
    backend = build_fake(engine, build_sampling(response_length=200, stop_ids=[99]))
    backend.load(build_policy("llama"))
    engine.fails_at = 3
    with pytest.raises(
        ConfigError, match=r"use_vllm: vLLM failed at sampling answers: EngineCore encountered"
    ) as caught:
        backend.generate(None, PROMPTS, draw(4))
    assert "run the same command to resume" in caught.value.problems[0].remedy


@pytest.fixture
def flags(policy_dir, prompts_file, tmp_path):
    def build(**keys):
        keys = {"use_vllm": True, "max_steps": 12, "save_strategy": "steps", "save_steps": 4, **keys}
        keys["per_device_train_batch_size"] = 8
        return keys_task.build_group_flags(policy_dir, tmp_path / "out", prompts_file, **keys)

    return build


def test_grpo_run_resumes_from_checkpoint_after_engine_failure(flags, policy_dir, tmp_path):
    """Three iterations of four steps; the engine fails in the second."""

    def run(fails_in=None):
        engine = FakeEngine(LlamaForCausalLM.from_pretrained(policy_dir))
        engine.fails_at = None if fails_in is None else (fails_in - 1) * keys_task.MAX_ANSWER + 2
        with colocated(engine):
            keys_task.train(flags(vllm_enable_sleep_mode=True), "grpo")
        return engine

    with pytest.raises(ConfigError, match="vLLM failed at sampling answers"):
        run(fails_in=2)
    assert json.loads((tmp_path / "out" / "checkpoint-4" / "COMPLETE.json").read_text())["step"] == 4
    engine = run()
    assert engine.calls.count("reload") == 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = {row["step"]: row["rollout/engine_mismatch_kl"] for row in rows if "rollout/engine_mismatch_kl" in row}
    assert [*gaps] == [4, 8, 12]
    assert all(abs(gap) < 1e-5 for gap in gaps.values())
    assert all(row["rollout/is_weight_max"] < 1.001 for row in rows if "rollout/is_weight_max" in row)


def test_weights_are_sent_before_each_batch_of_dynamic_sampling(flags, policy_dir, tmp_path):
    """In sleep mode, the engine discards the weights after each batch."""
    engine = FakeEngine(LlamaForCausalLM.from_pretrained(policy_dir))
    keys = {"reward_funcs": "[tests.rl.test_methods:score_half]", "missing_eos_penalty": "null", "max_steps": 4}
    with colocated(engine):
        keys_task.train(flags(vllm_enable_sleep_mode=True, max_num_gen_batches=5, **keys), "grpo")
    (event,) = read_events(tmp_path / "out")
    assert event["rollout/num_gen_batches"] > 1
    assert engine.calls.count("reload") == engine.calls.count("wake kv_cache") == event["rollout/num_gen_batches"]
    assert abs(event["rollout/engine_mismatch_kl"]) < 1e-5

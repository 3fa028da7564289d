"""Convergence of PPO on the keys task, and its failure with faults injected into the algorithm.

Check A: the reward is the share of the first key, or of the second. A constant answer scores 1/8, the policy before
training 1/2; a mean of 320 answers at that level reaches 0.75 with a probability below e^-30.

Check B: answers of one token, for which the optimum is known: the reference, tilted by ``exp(reward / kl_coef)``.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import run_forked
from tests.rl import keys_task
from tests.rows import read_events
from transformers import LlamaForCausalLM

from recipes_lib.rl import methods
from recipes_lib.rl.objectives import whiten

BETA = 1 / math.log(4)
ONE_TOKEN = {
    "max_steps": 320,
    "response_length": 1,
    "missing_eos_penalty": "null",
    "kl_coef": BETA,
    "learning_rate": 5e-4,
    "critic_learning_rate": 5e-4,
    "cliprange_value": "null",
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 128,
}
ADAPTERS = {"use_peft": True, "learning_rate": 2e-3, "critic_learning_rate": 2e-3}
SECOND = {"reward_funcs": "[tests.rl.keys_task:score_second_key]"}


@pytest.fixture(scope="module")
def small_policy(tmp_path_factory):
    """A policy of one narrow layer, which scores below 0.35."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=60, **sizes)


@pytest.fixture
def run_a(fine_tuned, tmp_path):
    """Train, by default for sixty iterations; return mean score and finish rate of the last five."""

    def run(seed, policy=None, **keys):
        prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 3840, 5)
        out = tmp_path / "-".join(["a", *keys])
        settings = {"max_steps": 240, "seed": seed, **keys}
        keys_task.train(keys_task.build_flags(policy or fine_tuned(seed), out, prompts, **settings))
        last = read_events(out)[-5:]
        return [sum(event[name] for event in last) / 5 for name in ("objective/score", "objective/finish_rate")]

    return run


@pytest.fixture
def run_b(fine_tuned, tmp_path):
    """Train, and return the results of ``measure_tilt``."""

    def run(seed, policy=None, **keys):
        prompts, policy = keys_task.write_prompts(tmp_path / "prompts.jsonl", 10_240, 6), policy or fine_tuned(seed)
        flags = keys_task.build_flags(policy, tmp_path / "b", prompts, **ONE_TOKEN | {"seed": seed} | keys)
        before = read_logps(LlamaForCausalLM.from_pretrained(policy))
        models = keys_task.train(flags)
        models.set_training(training=False)
        with models.using("policy") as policy:
            return measure_tilt(read_logps(policy), before)

    return run


def read_logps(model):
    """Return log-probabilities of the first answer token for 256 held-out prompts, ``(256, V)``."""
    prompts = keys_task.draw_prompts(256, seed=999)
    logits = torch.zeros(len(prompts), keys_task.VOCABULARY)
    with torch.no_grad():
        for length in set(map(len, prompts)):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            logits[rows] = model(input_ids=torch.tensor([prompts[row] for row in rows])).logits[:, -1]
    return logits.double().log_softmax(-1)


def measure_tilt(policy, reference):
    """Return distances to the optimum: total variation of the policy, KL error, total variation of the reference."""
    keys = torch.tensor([prompt[-2] for prompt in keys_task.draw_prompts(256, seed=999)])[:, None]
    reward = torch.zeros_like(reference).scatter(1, keys, 1.0)
    optimum = (reference + reward / BETA).log_softmax(-1)

    def distance(logps):
        return 0.5 * float((logps.exp() - optimum.exp()).abs().sum(1).mean())

    def kl(logps):
        return float((logps.exp() * (logps - reference)).sum(1).mean())

    return distance(policy), abs(kl(policy) - kl(optimum)), distance(reference)


def is_optimal(distance, kl_error, start):
    assert start > 0.25  # The initial policy must not pass.
    return distance < 0.05 and kl_error < 0.03


def test_ppo_learns_rewarded_key(run_a, small_policy):
    score, finished = run_a(0, small_policy, max_steps=80, learning_rate=2e-3, critic_learning_rate=2e-3)
    assert score >= 0.75
    assert finished >= 0.95


def test_ppo_converges_to_kl_optimum(run_b, small_policy):
    assert is_optimal(*run_b(0, small_policy, max_steps=220, learning_rate=1e-3, critic_learning_rate=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_ppo_learns_either_key_on_every_seed(run_a, seed):
    # At sixty iterations, the slowest of the eight runs is between 0.74 and 0.83, depending on rounding.
    results = [run_a(seed, max_steps=320), run_a(seed, max_steps=320, **SECOND)]
    assert all(score >= 0.75 for score, _ in results)
    assert sum(score for score, _ in results) / 2 >= 0.85
    assert all(finished >= 0.95 for _, finished in results)


@pytest.mark.slow
def test_ppo_learns_rewarded_key_with_adapters(run_a):
    score, finished = run_a(0, use_peft=True, learning_rate=5e-3, critic_learning_rate=5e-3, cliprange_value="null")
    assert score >= 0.75
    assert finished >= 0.95


@pytest.mark.slow
def test_ppo_does_not_learn_from_shuffled_rewards(run_a):
    assert run_a(0, reward_funcs="[tests.rl.keys_task:score_shuffled]")[0] < 0.6


@pytest.mark.slow
def test_ppo_unlearns_with_flipped_advantages(run_a, monkeypatch):
    monkeypatch.setattr(methods, "whiten", lambda values, mask, **options: -whiten(values, mask, **options))
    assert run_a(0)[0] < 0.1


@pytest.mark.slow
def test_ppo_fails_with_score_at_first_token(run_a, monkeypatch):
    def misplace(scores, kl, mask, kl_coef):
        rewards = torch.where(mask, -kl_coef * kl, 0.0)
        rewards[:, 0] += scores
        return rewards

    monkeypatch.setattr(methods, "compute_rewards", misplace)
    assert run_a(0)[0] < 0.75


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_converges_to_kl_optimum_on_every_seed(run_b, seed):
    assert is_optimal(*run_b(seed))


@pytest.mark.slow
def test_ppo_converges_to_kl_optimum_with_adapters(run_b):
    assert is_optimal(*run_b(0, **ADAPTERS))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ppo_converges_to_kl_optimum_on_two_processes(fine_tuned, tmp_path):
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 10_240, 6)
    settings = ONE_TOKEN | {"seed": 0, "per_device_train_batch_size": 32, "save_strategy": "steps", "save_steps": 320}
    flags = keys_task.build_flags(fine_tuned(0), tmp_path / "b", prompts, **settings)
    run_forked("tests.rl.keys_task", json.dumps([["ppo", flags]]))
    policy = LlamaForCausalLM.from_pretrained(fine_tuned(0))
    before = read_logps(policy)
    policy.load_state_dict(load_file(tmp_path / "b" / "checkpoint-320" / "policy.safetensors"))
    assert is_optimal(*measure_tilt(read_logps(policy), before))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_ppo_misses_optimum_of_another_kl_coef(run_b, factor):
    assert not is_optimal(*run_b(0, kl_coef=factor * BETA))


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimate",
    [lambda logps, ref: (ref - logps).exp() - 1 + (logps - ref), lambda logps, ref: ref - logps],
    ids=["k3", "negated"],
)
def test_ppo_misses_optimum_with_other_kl_estimators(run_b, monkeypatch, estimate):
    monkeypatch.setattr(methods, "estimate_kl", estimate)
    assert not is_optimal(*run_b(0))

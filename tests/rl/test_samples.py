"""Sample answers: records of ``samples.jsonl`` and evaluation metrics."""

from __future__ import annotations

import dataclasses
from math import nan
from types import SimpleNamespace

import pytest
import torch
from tests.rl.test_rollout import build_rollout

from recipes_lib.rl.monitor import describe_samples, read_samples


def build(rewards):
    rewards = torch.tensor(rewards)
    finished, scored = torch.tensor([True, False, True]), ~rewards.isnan().all(1)
    answers = build_rollout([(1, 2), (1, 4), (1, 3)])
    return dataclasses.replace(answers, finished=finished, scored=scored, scores=rewards.nansum(1), rewards=rewards)


def test_samples_have_rewards_and_mean_metrics():
    answers = build([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert describe_samples(answers, ["right", "short"]) == {
        "eval_reward": pytest.approx(4 / 3),
        "eval_reward/right": pytest.approx(2 / 3),
        "eval_reward/short": pytest.approx(2 / 3),
        "eval_stop_rate": pytest.approx(2 / 3),
        "eval_mean_sample_tokens": 3.0,
    }
    tokenizer = SimpleNamespace(decode=lambda ids: f"prompt {ids[0]}")
    expected_prompts = [f"prompt {prompt.input_ids[0]}" for prompt in answers.prompts]
    read = list(read_samples(answers, ["a", "b", "c"], tokenizer))
    assert [(sample.prompt, sample.completion, reward) for sample, reward in read] == [
        *zip(expected_prompts, "abc", [1.0, 1.0, 2.0], strict=True)
    ]
    assert [(sample.stopped, sample.num_tokens) for sample, _ in read] == [(True, 2), (False, 4), (True, 3)]


def test_unscored_sample_has_no_reward_and_is_excluded_from_means():
    answers = build([[1.0, nan], [nan, nan], [0.0, 2.0]])
    tokenizer = SimpleNamespace(decode=str)
    assert [reward for _, reward in read_samples(answers, "abc", tokenizer)] == [1.0, None, 2.0]
    figures = describe_samples(answers, ["right", "short"])
    assert [figures[f"eval_reward{name}"] for name in ("", "/right", "/short")] == [1.5, 0.5, 2.0]
    assert figures["eval_stop_rate"] == pytest.approx(2 / 3)


def test_single_reward_has_no_separate_metric():
    assert "eval_reward/right" not in describe_samples(build([[1.0], [0.0], [1.0]]), ["right"])

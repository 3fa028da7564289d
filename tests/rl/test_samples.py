"""Sample answers: records of ``samples.jsonl`` and evaluation metrics."""

from __future__ import annotations

import dataclasses
from math import nan
from types import SimpleNamespace

import pytest
import torch
from tests.rl.test_rollout import build_rollout

from recipes_lib.rl.monitor import describe_samples


def build(rewards):
    rewards = torch.tensor(rewards)
    finished, scored = torch.tensor([True, False, True]), ~rewards.isnan().all(1)
    answers = build_rollout([(1, 2), (1, 4), (1, 3)])
    return dataclasses.replace(answers, finished=finished, scored=scored, scores=rewards.nansum(1), rewards=rewards)


TOKENIZER = SimpleNamespace(decode=lambda ids: f"prompt {ids[0]}")


def test_samples_have_rewards_and_mean_metrics():
    answers = build([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    records, figures = describe_samples(answers, ["a", "b", "c"], TOKENIZER, ["right", "short"])
    assert figures == {
        "eval_reward": pytest.approx(4 / 3),
        "eval_reward/right": pytest.approx(2 / 3),
        "eval_reward/short": pytest.approx(2 / 3),
        "eval_stop_rate": pytest.approx(2 / 3),
        "eval_mean_sample_tokens": 3.0,
    }
    prompts = [f"prompt {prompt.input_ids[0]}" for prompt in answers.prompts]
    columns = (prompts, "abc", [None] * 3, [True, False, True], [2, 4, 3], [1.0, 1.0, 2.0])
    names = ("prompt", "completion", "reference", "stopped", "num_tokens", "reward")
    assert records == [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def test_unscored_sample_has_no_reward_and_is_excluded_from_means():
    answers = build([[1.0, nan], [nan, nan], [0.0, 2.0]])
    records, figures = describe_samples(answers, "abc", TOKENIZER, ["right", "short"])
    assert [record["reward"] for record in records] == [1.0, None, 2.0]
    assert [figures[f"eval_reward{name}"] for name in ("", "/right", "/short")] == [1.5, 0.5, 2.0]
    assert figures["eval_stop_rate"] == pytest.approx(2 / 3)


def test_single_reward_has_no_separate_metric():
    _, figures = describe_samples(build([[1.0], [0.0], [1.0]]), "abc", TOKENIZER, ["right"])
    assert "eval_reward/right" not in figures

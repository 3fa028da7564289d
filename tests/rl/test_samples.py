"""Fixed prompts answered as training goes on: the answers, and what each reward says of them."""

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


def test_answers_are_written_with_their_rewards():
    answers = build([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert describe_samples(answers, ["right", "short"]) == {
        "eval_reward": pytest.approx(4 / 3),
        "eval_reward/right": pytest.approx(2 / 3),
        "eval_reward/short": pytest.approx(2 / 3),
        "eval_stop_rate": pytest.approx(2 / 3),
        "eval_mean_sample_tokens": 3.0,
    }
    tokenizer = SimpleNamespace(decode=lambda ids: f"prompt {ids[0]}")
    asked = [f"prompt {prompt.input_ids[0]}" for prompt in answers.prompts]
    read = list(read_samples(answers, ["a", "b", "c"], tokenizer))
    assert [(sample.prompt, sample.completion, reward) for sample, reward in read] == [
        *zip(asked, "abc", [1.0, 1.0, 2.0], strict=True)
    ]
    assert [(sample.stopped, sample.num_tokens) for sample, _ in read] == [(True, 2), (False, 4), (True, 3)]


def test_an_answer_that_no_reward_scores_is_written_without_one_and_counts_in_no_mean():
    answers = build([[1.0, nan], [nan, nan], [0.0, 2.0]])
    tokenizer = SimpleNamespace(decode=str)
    assert [reward for _, reward in read_samples(answers, "abc", tokenizer)] == [1.0, None, 2.0]
    figures = describe_samples(answers, ["right", "short"])
    assert [figures[f"eval_reward{name}"] for name in ("", "/right", "/short")] == [1.5, 0.5, 2.0]
    assert figures["eval_stop_rate"] == pytest.approx(2 / 3)


def test_one_reward_is_not_told_twice():
    assert "eval_reward/right" not in describe_samples(build([[1.0], [0.0], [1.0]]), ["right"])

"""Fixed prompts answered as training goes on: the answers, what each reward says of them, and which are asked."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.rl.monitor import ScoredSamples, choose_samples
from recipes_lib.rl.rewards import Rewards

PROMPTS = [PromptRow("here", [n], f"prompt {n}", {}) for n in range(3)]


def build(functions, known=True):
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]] if known else [[1.0, nan], [nan, nan], [0.0, 2.0]])
    rewards = rewards[:, : len(functions)]
    answers = SimpleNamespace(
        finished=torch.tensor([True, False, True]),
        lengths=torch.tensor([2, 4, 3]),
        scored=~rewards.isnan().all(1),
        scores=rewards.nansum(1),
        rewards=rewards,
    )
    collector = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda ids: f"prompt {ids[0]}"),
        rewards=Rewards(functions, None, [1.0] * len(functions)),
        answer=lambda prompts, numbers: (answers, [f"text {n}" for n in numbers]),
    )
    written = []
    return ScoredSamples(collector, PROMPTS, lambda *given: written.append(given)), written


def test_answers_are_written_with_their_rewards():
    samples, written = build({"right": print, "short": print})
    figures = samples.answer(7)
    assert figures == {
        "reward": pytest.approx(4 / 3),
        "reward/right": pytest.approx(2 / 3),
        "reward/short": pytest.approx(2 / 3),
        "stop_rate": pytest.approx(2 / 3),
        "mean_sample_tokens": 3.0,
    }
    assert [(step, sample.prompt, sample.completion, reward) for step, sample, reward in written] == [
        (7, "prompt 0", "text 0", 1.0),
        (7, "prompt 1", "text 1", 1.0),
        (7, "prompt 2", "text 2", 2.0),
    ]
    assert [sample.stopped for _, sample, _ in written] == [True, False, True]


def test_an_answer_that_no_reward_scores_is_written_without_one_and_counts_in_no_mean():
    samples, written = build({"right": print, "short": print}, known=False)
    figures = samples.answer(7)
    assert [reward for _, _, reward in written] == [1.0, None, 2.0]
    assert (figures["reward"], figures["reward/right"], figures["reward/short"]) == (1.5, 0.5, 2.0)
    assert figures["stop_rate"] == pytest.approx(2 / 3)


def test_one_reward_is_not_told_twice():
    assert "reward/right" not in build({"right": print})[0].answer(0)


def test_held_out_prompts_are_asked_where_there_are_any():
    held_out = PROMPTS[:1]
    data = PromptData(train=PROMPTS, eval=held_out, terminators=[], max_length=9, record={})
    assert choose_samples(data, 2) == held_out
    assert choose_samples(PromptData(PROMPTS, [], [], 9, {}), 2) == PROMPTS[:2]

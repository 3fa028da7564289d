"""Pairs of a policy's own answers: which two are chosen, and which prompts are left where a command was killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.commands.test_row_file import Killed, killed_after

from recipes_lib.commands.sampling import Answered, PairCounts, RowFile, choose_pair, sample_pairs
from recipes_lib.data.prompts import PromptRow
from recipes_lib.data.sources.formats import canonicalize, detect_format


def answers(*scores):
    return [Answered(f"answer {at}", score, usable=True) for at, score in enumerate(scores)]


def test_the_best_and_the_worst_are_the_pair():
    best, worst = choose_pair(answers(1.0, 3.0, -1.0, 2.0))
    assert (best.text, worst.text) == ("answer 1", "answer 2")
    best, worst = choose_pair(answers(1.0, 2.0, 2.0, 1.0))
    assert (best.text, worst.text) == ("answer 1", "answer 0")


def test_answers_alike_in_worth_or_in_words_are_no_pair():
    assert choose_pair(answers(2.0, 2.0, 2.0)) is None
    assert choose_pair([Answered("same", 1.0, usable=True), Answered("same", 2.0, usable=True)]) is None


def test_an_answer_that_ran_into_the_limit_takes_no_part():
    cut = Answered("cut", 9.0, usable=False)
    best, worst = choose_pair([cut, *answers(0.0, 1.0)])
    assert (best.text, worst.text) == ("answer 1", "answer 0")
    assert choose_pair([cut, *answers(0.0)]) is None


class Collector:
    """Answers with the number of the answer, which is also its worth; those of prompt 2 are worth the same."""

    batch_size = 5

    def __init__(self, unscored=(), first=" 0"):
        self.asked, self.unscored, self.first = [], unscored, first

    def answer(self, prompts, numbers):
        self.asked.append(list(numbers))
        scores = [
            0.0 if prompt.content == "prompt 2" or n in self.unscored else float(n)
            for prompt, n in zip(prompts, numbers, strict=True)
        ]
        finished = [prompt.content != "prompt 3" for prompt in prompts]
        known = SimpleNamespace(
            scores=torch.tensor(scores),
            finished=torch.tensor(finished),
            scored=torch.tensor([n not in self.unscored for n in numbers]),
        )
        return known, [f" {n}" if n else self.first for n in numbers]


PROMPTS = [PromptRow("here", [1], f"prompt {n}", {}) for n in range(5)]


def test_every_prompt_has_answers_of_its_own_numbers_and_all_are_counted():
    collector, counts = Collector(), PairCounts()
    rows = [row for batch in sample_pairs(collector, PROMPTS, 2, counts) for row in batch]
    assert collector.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [
        ("prompt 0", " 1", " 0"),
        ("prompt 1", " 3", " 2"),
        ("prompt 4", " 9", " 8"),
    ]
    assert rows[-1]["score_chosen"], rows[-1]["score_rejected"] == (9.0, 8.0)
    assert (counts.num_prompts, counts.num_pairs, counts.num_alike, counts.num_unfinished) == (5, 3, 1, 1)
    assert (counts.num_answers, counts.score_sum) == (10, 45.0 - 9.0)


@pytest.mark.parametrize("content", ["Why?", [{"role": "user", "content": "Why?"}]])
def test_a_row_is_of_the_preference_layout(content):
    prompt = PromptRow("here", [1], content, {})
    (row,) = next(iter(sample_pairs(Collector(), [prompt], 2, PairCounts())))
    layout = detect_format(row, where="here")
    assert layout.name == "preference"
    canonical = canonicalize(row, layout, "here", 0)
    assert canonical.rejected


@pytest.mark.parametrize("first", ["", " \n", "a\0b", "\ud83d"])
def test_an_answer_that_no_row_may_hold_is_in_no_pair(first):
    collector = Collector(first=first)
    rows = [row for batch in sample_pairs(collector, PROMPTS[:2], 3, PairCounts()) for row in batch]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(" 2", " 1"), (" 5", " 3")]


def test_an_answer_that_no_reward_scores_is_in_no_pair_and_in_no_mean():
    collector, counts = Collector(unscored=(0, 3, 4)), PairCounts()
    rows = [row for batch in sample_pairs(collector, PROMPTS[:2], 3, counts) for row in batch]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(" 2", " 1")]
    assert (counts.num_unfinished, counts.num_answers, counts.score_sum) == (1, 3, 1.0 + 2.0 + 5.0)


def test_a_killed_command_goes_on_with_the_prompts_that_are_left(tmp_path):
    whole = open_pairs(tmp_path / "whole.jsonl")
    whole.write(sample_pairs(Collector(), PROMPTS, 2, whole.counts))
    path = tmp_path / "pairs.jsonl"
    first = open_pairs(path)
    with pytest.raises(Killed):
        first.write(killed_after(sample_pairs(Collector(), PROMPTS, 2, first.counts), 2))
    again, collector = open_pairs(path), Collector()
    assert again.counts.num_prompts == 4
    again.write(sample_pairs(collector, PROMPTS, 2, again.counts))
    assert collector.asked == [[8, 9]]
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again.counts == whole.counts


def open_pairs(path):
    return RowFile(path, "key", PairCounts(), what="other pairs")

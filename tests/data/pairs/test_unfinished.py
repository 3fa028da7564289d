"""Truncated answers as rejected ones: share, kinds, and determinism by seed and index."""

from types import SimpleNamespace

import numpy as np
import pytest

from recipes_lib.data.pairs.preference_sets import UnfinishedAnswers

END = 7
TOKENIZER = SimpleNamespace(added_tokens_decoder={}, eos_token_id=END)


def make_pairs(num, length=6, **columns):
    random = np.random.default_rng(0)

    def answer():
        return np.append(random.integers(10, 100, length), END).astype(np.uint32)

    return [
        {"prompt_ids": np.array([1, 2], np.uint32), "chosen_ids": answer(), "rejected_ids": answer(), **columns}
        for _ in range(num)
    ]


def find_drawn(pairs, unfinished):
    return [n for n, pair in enumerate(pairs) if unfinished[n]["rejected_ids"] is not pair["rejected_ids"]]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_share_of_truncated_answers_and_half_without_end_token_only(share):
    pairs = make_pairs(4000)
    unfinished = UnfinishedAnswers(pairs, TOKENIZER, share, 0)
    drawn = find_drawn(pairs, unfinished)
    assert len(drawn) == pytest.approx(4000 * share, abs=4 * np.sqrt(4000 * share * (1 - share)))
    cuts = np.array([len(unfinished[n]["rejected_ids"]) for n in drawn])
    assert set(cuts) == set(range(1, 7))
    # Half of them by choice, and of the others one in six, whose random length is the full one.
    assert (cuts == 6).mean() == pytest.approx(1 / 2 + 1 / 12, abs=4 / np.sqrt(len(drawn)))


def test_truncated_answer_is_proper_prefix_of_chosen():
    pairs = make_pairs(100, margin=2.0)
    for pair, other in zip(pairs, UnfinishedAnswers(pairs, TOKENIZER, 1.0, 0), strict=True):
        rejected = other["rejected_ids"]
        np.testing.assert_array_equal(rejected, pair["chosen_ids"][: len(rejected)])
        assert END not in rejected
        assert (other["prompt_ids"] == pair["prompt_ids"]).all()
        assert other["chosen_ids"] is pair["chosen_ids"]
        assert other["margin"] == 0


def test_line_break_after_end_token_is_removed_with_it():
    pairs = make_pairs(100)
    longer = [{**pair, "chosen_ids": np.append(pair["chosen_ids"], np.uint32(5))} for pair in pairs]
    plain, cut = (UnfinishedAnswers(some, TOKENIZER, 1.0, 0) for some in (pairs, longer))
    for one, other in zip(plain, cut, strict=True):
        np.testing.assert_array_equal(one["rejected_ids"], other["rejected_ids"])


def test_truncation_is_function_of_seed_and_index():
    pairs = make_pairs(200)
    ours, again, other = (UnfinishedAnswers(pairs, TOKENIZER, 0.5, seed) for seed in (0, 0, 1))
    backwards = {n: len(ours[n]["rejected_ids"]) for n in reversed(range(200))}
    assert [backwards[n] for n in range(200)] == [len(pair["rejected_ids"]) for pair in again]
    assert find_drawn(pairs, ours) != find_drawn(pairs, other)


def test_zero_share_and_empty_answers_are_unchanged():
    pairs, ends = make_pairs(50), make_pairs(50, length=0)
    assert not find_drawn(pairs, UnfinishedAnswers(pairs, TOKENIZER, 0.0, 0))
    assert not find_drawn(ends, UnfinishedAnswers(ends, TOKENIZER, 1.0, 0))

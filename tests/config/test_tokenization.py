"""Normalised messages; number of token ids, tokens before a text, end tokens, and tokens before the end of answers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from recipes_lib.config.tokenization import count_before_end, count_ids, find_end_tokens, find_prefix, normalise_message


@pytest.mark.parametrize(("ids", "expected"), [([], 0), ([0, 1, 2], 3), ([7, 0, 2], 8)])
def test_count_ids_is_largest_id_plus_one(ids: list[int], expected: int) -> None:
    assert count_ids(SimpleNamespace(get_vocab=lambda: {str(at): at for at in ids})) == expected


def test_count_ids_includes_added_tokens(tiny_tokenizer) -> None:
    ids = [*tiny_tokenizer.get_vocab().values(), *tiny_tokenizer.added_tokens_decoder]
    assert count_ids(tiny_tokenizer) == max(ids) + 1


def test_end_tokens_are_the_special_tokens(tiny_tokenizer) -> None:
    ids = set(tiny_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]))
    assert find_end_tokens(tiny_tokenizer) == ids
    added = {1: SimpleNamespace(special=True), 2: SimpleNamespace(special=False)}
    for eos, expected in ((None, {1}), (5, {1, 5})):
        assert find_end_tokens(SimpleNamespace(added_tokens_decoder=added, eos_token_id=eos)) == expected


@pytest.mark.parametrize(
    ("bare", "whole", "prefix"),
    [([7], [7], []), ([7], [1, 7], [1]), ([7], [1, 2, 7, 3], [1, 2]), ([7], [7, 3], []), ([], [1], []), ([7], [9], [])],
)
def test_prefix_is_what_comes_before_the_text(bare: list[int], whole: list[int], prefix: list[int]) -> None:
    assert find_prefix(bare, whole) == prefix


@pytest.mark.parametrize(
    ("answer", "before"),
    [
        ([1, 2, 7], 2),
        ([1, 2, 7, 5], 2),
        ([7, 1, 2, 3, 7], 4),
        # A short answer can begin with a special token.
        ([9, 1, 7], 2),
        ([9, 1, 7, 5], 2),
        ([1, 2], 1),
        ([7], 0),
    ],
)
def test_count_before_end_excludes_end_token_and_padding(answer: list[int], before: int) -> None:
    assert count_before_end(np.array(answer), {7, 9}) == before


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "Hi"}, {}),
        ({"role": "assistant", "content": None}, {"content": None}),
        ({"role": "user", "content": "Hi", "name": None}, {"name": None}),
        ({"role": "assistant", "content": "3", "reasoning": "c"}, {"thinking": "c", "reasoning_content": "c"}),
        ({"role": "assistant", "content": "3", "thinking": "a", "reasoning_content": "b"}, {}),
        ({"role": "assistant", "content": "3", "thinking": None, "reasoning_content": "b"}, {"thinking": "b"}),
    ],
)
def test_message_is_normalised(message, expected):
    before = dict(message)
    changed = {key: value for key, value in {**message, **expected}.items() if value is not None}
    assert normalise_message(message) == changed
    assert message == before

"""Token boundaries of character positions, and refusal of positions inside a token."""

from __future__ import annotations

import copy
import re

import pytest
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.chat.encoder import MergedTokenError, count_tokens_before


def test_token_boundaries_are_found_and_inner_positions_refused(tiny_tokenizer) -> None:
    text = "<|im_start|>user\nThe capital of France is Paris.<|im_end|>"
    encoding = tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts = {start: token for token, (start, _) in enumerate(encoding.offsets)}
    for at in range(len(text)):
        if at in starts:
            assert count_tokens_before(encoding, text, at, set()) == starts[at]
        else:
            start = max(start for start in starts if start < at)
            with pytest.raises(MergedTokenError, match=re.escape(f"one token holds {text[start:at]!r} and '")):
                count_tokens_before(encoding, text, at, set())
    assert count_tokens_before(encoding, text, len(text), set()) == len(encoding)


def test_multi_token_character_is_counted_whole(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a\U0001f600b"
    encoding = tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert len(encoding) == 6
    assert [count_tokens_before(encoding, text, at, set()) for at in range(4)] == [0, 1, 5, 6]


def test_absorbed_white_space_belongs_to_special_token_and_dropped_characters_to_none(tiny_tokenizer) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer.backend_tokenizer)
    tokenizer.add_special_tokens([AddedToken("<x>", special=True, lstrip=True, rstrip=True)])
    special = {tokenizer.token_to_id("<x>")}
    encoding = tokenizer.encode("a <x> b", add_special_tokens=False)
    assert len(encoding) == 3
    assert [count_tokens_before(encoding, "a <x> b", at, special) for at in (0, 1, 2, 5, 6, 7)] == [0, 1, 1, 2, 2, 3]
    for at, ids in ((3, special), (5, set())):
        with pytest.raises(MergedTokenError):
            count_tokens_before(encoding, "a <x> b", at, ids)
    tokenizer.normalizer = normalizers.Replace("-", "")
    encoding = tokenizer.encode("a- b-", add_special_tokens=False)
    assert [count_tokens_before(encoding, "a- b-", at, special) for at in (0, 1, 2, 4)] == [0, 1, 1, 2]

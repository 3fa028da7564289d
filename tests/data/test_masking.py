"""Token boundaries of character positions, and refusal of positions inside a token."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.masking import MergedTokenError, count_tokens_before


def test_token_boundaries_are_found_and_inner_positions_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "<|im_start|>user\nThe capital of France is Paris.<|im_end|>"
    encoding = tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts = {start: token for token, (start, _) in enumerate(encoding.offsets)}
    for at in range(len(text)):
        if at in starts:
            assert count_tokens_before(encoding, text, at, set()) == starts[at]
        else:
            with pytest.raises(MergedTokenError) as refused:
                count_tokens_before(encoding, text, at, set())
            assert refused.value.start < at < refused.value.end
    assert count_tokens_before(encoding, text, len(text), set()) == len(encoding)


def test_multi_token_character_is_counted_whole(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a\U0001f600b"
    encoding = tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert len(encoding) == 6
    assert [count_tokens_before(encoding, text, at, set()) for at in range(4)] == [0, 1, 5, 6]

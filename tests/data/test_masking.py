"""Labels, target counts, and the token that a character begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.masking import (
    IGNORE_INDEX,
    MergedTokenError,
    count_targets,
    count_tokens_before,
    labels_from_loss_mask,
)

EXAMPLES = st.lists(st.tuples(st.integers(0, 2**31), st.booleans()), min_size=1, max_size=30)


@given(EXAMPLES)
def test_labels_are_the_trained_ids_and_nothing_else(example: list[tuple[int, bool]]) -> None:
    ids, mask = np.array([i for i, _ in example], dtype=np.uint32), np.array([m for _, m in example])
    labels = labels_from_loss_mask(ids, mask)
    assert labels.dtype == np.int64
    assert labels.tolist() == [i if m and at else IGNORE_INDEX for at, (i, m) in enumerate(example)]


@given(EXAMPLES)
def test_targets_are_what_torch_s_shifted_loss_counts(example: list[tuple[int, bool]]) -> None:
    ids, mask = np.array([i % 7 for i, _ in example]), np.array([m for _, m in example])
    labels = torch.from_numpy(labels_from_loss_mask(ids, mask))[1:]
    total = torch.nn.functional.cross_entropy(torch.zeros(len(labels), 7), labels, reduction="sum")
    assert count_targets(mask) == pytest.approx(float(total / np.log(7)), abs=1e-3)


def test_no_tokens_no_targets() -> None:
    assert count_targets([]) == 0
    assert labels_from_loss_mask([], []).tolist() == []


def test_the_boundary_of_every_token_is_found_and_every_other_is_refused(
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


def test_a_character_of_several_tokens_is_never_cut(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a\U0001f600b"
    encoding = tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert len(encoding) == 6
    assert [count_tokens_before(encoding, text, at, set()) for at in range(4)] == [0, 1, 5, 6]

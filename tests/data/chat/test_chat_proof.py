"""Verification of the loss mask by decoding the trained tokens in context."""

from __future__ import annotations

import numpy as np
import pytest
from tests.data.templates.tokenizers import build_byte_level, build_lossy, build_metaspace
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.chat.encoder import Claim, Proof

TEXT = "hello caf\u00e9 \U0001f600 Paris</s>"
BUILDERS = [lambda: build_byte_level(""), lambda: build_metaspace(None), lambda: build_lossy("")]


def problems(tokenizer: PreTrainedTokenizerFast, first: int, last: int, text: str) -> list[str]:
    ids = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    return [str(problem) for problem in Proof(tokenizer).problems([Claim("here", np.array(ids), first, last, text)])]


@pytest.mark.parametrize("build", BUILDERS)
def test_proof_accepts_exactly_whole_character_runs(build: object) -> None:
    tokenizer = build()  # type: ignore[operator]
    encoding = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False)
    starts = {start: token for token, (start, _) in reversed(list(enumerate(encoding.offsets)))}
    cuts = [*sorted(starts.items()), (len(TEXT), len(encoding))]
    for position, (start, first) in enumerate(cuts):
        for end, last in cuts[position + 1 :]:
            text = TEXT[start:end]
            assert problems(tokenizer, first, last, text) == []
            assert len(problems(tokenizer, first, last, text + "x")) == 1
            assert len(problems(tokenizer, first, last, "x" + text)) == 1


def test_partial_character_differs_from_replacement_character() -> None:
    tokenizer = build_byte_level("")
    encoding = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False)
    part = encoding.char_to_token(TEXT.index("\U0001f600"))
    assert part is not None
    assert tokenizer.decode([encoding.ids[part]]) == "\ufffd"
    assert Proof(tokenizer)._decode_one(encoding.ids[part]) != "\ufffd"


def test_failed_proof_shows_first_difference() -> None:
    (problem,) = problems(build_byte_level(""), 0, 0, "text")
    assert problem.startswith("here: trained tokens decode to a different text: decoded '', expected 'text'")


def test_texts_are_equal_only_up_to_normalizer() -> None:
    tokenizer = build_lossy("")
    ids = tokenizer.backend_tokenizer.encode("CAFE\u0301", add_special_tokens=False).ids
    assert Proof(tokenizer).problems([Claim("here", np.array(ids), 0, len(ids), "CAFE\u0301")]) == []
    assert len(Proof(tokenizer).problems([Claim("here", np.array(ids), 0, len(ids), "CAFE")])) == 1

"""The proof of a mask: the tokens that are trained on, decoded, are the characters they were chosen for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from recipes_lib.errors import Problem

_EXCERPT: Final = 20
_REMEDY: Final = "change the text, or use a tokenizer that can write it"


class Claim(NamedTuple):
    """Tokens ``first:last`` of a row, claimed to say ``text``."""

    where: str
    ids: npt.NDArray[np.uint32]
    first: int
    last: int
    text: str


class _Surfaces(dict[int, str]):
    """What each token says by itself; a lone surrogate, which equals no text, for tokens of part of a character."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> str:
        said = str(self._backend.decode([token], skip_special_tokens=False))
        self[token] = said = "\ud800" if "\ufffd" in said else said
        return said


class Proof:
    """Decodes claims and compares.

    A byte-level decoder only puts tokens side by side, so where all of them are whole characters their own texts are
    put together here, at a tenth of the price of ``decode_batch``.

    Args:
        tokenizer: A fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._surfaces = _Surfaces(self._backend) if isinstance(self._backend.decoder, ByteLevel) else None
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._swallowing = [
            (re.compile((r"\s*" if t.lstrip else "") + re.escape(str(t)) + (r"\s*" if t.rstrip else "")), str(t))
            for t in special
            if t.lstrip or t.rstrip
        ]

    def problems(self, claims: Sequence[Claim]) -> list[Problem]:
        """One problem for each claim that does not hold."""
        claims = [claim for claim in claims if not self._is_plain(claim)]
        decoded = self._backend.decode_batch(
            [c.ids[c.first : c.last].tolist() for c in claims], skip_special_tokens=False
        )
        return [
            Problem(claim.where, f"the tokens trained on do not say the text: {_difference(said, claim.text)}", _REMEDY)
            for claim, said in zip(claims, decoded, strict=True)
            if said != claim.text and not self._holds_in_context(claim)
        ]

    def _is_plain(self, claim: Claim) -> bool:
        if self._surfaces is None:
            return False
        return "".join(map(self._surfaces.__getitem__, claim.ids[claim.first : claim.last].tolist())) == claim.text

    def _holds_in_context(self, claim: Claim) -> bool:
        """Whether the tokens say their text after those before them, up to what the tokenizer itself makes equal.

        Decoders drop a leading space at the start of a text. Normalisers change characters, and special tokens swallow
        white space beside them, in every use of the tokenizer: what they make equal no model can tell apart.
        """
        before, said = (
            self._backend.decode(claim.ids[:end].tolist(), skip_special_tokens=False)
            for end in (claim.first, claim.last)
        )
        return self._fold(said) == self._fold(before + claim.text)

    def _fold(self, text: str) -> str:
        for pattern, token in self._swallowing:
            text = pattern.sub(token.replace("\\", r"\\"), text)
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _difference(said: str, text: str) -> str:
    """Both texts from shortly before where they part."""
    at = next((i for i, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), min(len(said), len(text)))
    start = max(0, at - _EXCERPT)
    return f"they say {said[start : at + _EXCERPT]!r}, the text says {text[start : at + _EXCERPT]!r}"

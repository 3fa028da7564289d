"""UTF-8 bytes of each token: token boundaries in a text, and text length of a token sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.token_ids import count_ids

_RAW_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_METASPACE = "\u2581"


def compute_token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.int64] | None:
    """Bytes of UTF-8 that each id decodes to, ``int64 (V,)``; a special token stands for its own text.

    The lengths of a text's tokens add up to the length of the text, whatever the tokens cut through. In
    SentencePiece-style vocabularies the space in front of the first word counts, although decoding drops it. An id that
    no token has stands for nothing.

    Returns:
        ``None`` for a tokenizer that does not keep its text (WordPiece), or that has no fast implementation.

    Source: the decoders of the ``tokenizers`` library; ``tests/data/chat/test_token_bytes.py``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoders = set(_iterate_types(json.loads(backend.to_str())["decoder"]))
    if "ByteLevel" not in decoders and not decoders & {"ByteFallback", "Metaspace"}:
        return None
    lengths = np.zeros(count_ids(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token) if "ByteLevel" in decoders else _count_bytes(token)
    for index, added in tokenizer.added_tokens_decoder.items():
        lengths[index] = len(added.content.encode())  # Added tokens bypass the decoder.
    return lengths


class ByteEnds:
    """Finds where tokens end by adding up their lengths, so that the tokenizer need not keep track of characters.

    Only for tokenizers that write text as it is: a byte-level decoder, no normaliser. Keeping track costs them a third
    of their time.

    Args:
        tokenizer: A fast tokenizer for which ``ByteEnds.suits`` is True.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        lengths = compute_token_byte_lengths(tokenizer)
        assert lengths is not None
        self._lengths = lengths

    @staticmethod
    def suits(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the text of a tokenizer's tokens, side by side, is the text that it was given."""
        backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.values()
        return (
            isinstance(backend.decoder, ByteLevel)
            and backend.normalizer is None
            and not any(token.lstrip or token.rstrip for token in added)
        )

    def cut(
        self, ids: Sequence[npt.NDArray[np.uint32]], texts: Sequence[str], places: Sequence[Sequence[int]]
    ) -> list[list[int] | None]:
        """Number of tokens before each of some characters of each text.

        Args:
            ids: Tokens of each text, ``uint32 (T,)``.
            texts: The texts.
            places: Characters of each text, as indices into it.

        Returns:
            For each text one number a place; ``None`` where a token lies on both sides of a place, or where the tokens
            are not the text as it stands.
        """
        last = np.cumsum([0, *map(len, ids)])
        # Entry n is the byte, counted through all texts, at which the first n tokens end.
        ends = np.concatenate([[0], self._lengths[np.concatenate([*ids, np.empty(0, np.uint32)])]]).cumsum()
        starts = ends[last].tolist()
        wanted = [
            start + (at if text.isascii() else len(text[:at].encode()))
            for text, start, text_places in zip(texts, starts, places, strict=False)
            for at in (*text_places, len(text))
        ]
        found = ends.searchsorted(wanted)
        exact = (ends.take(found, mode="clip") == wanted).tolist()
        counts, cuts, done = found.tolist(), list[list[int] | None](), 0
        for first, next_first, text_places in zip(last.tolist(), last[1:].tolist(), places, strict=False):
            span = slice(done, done + len(text_places) + 1)
            is_whole = all(exact[span]) and counts[span][-1] == next_first
            cuts.append([count - first for count in counts[span][:-1]] if is_whole else None)
            done = span.stop
        return cuts


def _count_bytes(token: str) -> int:
    return 1 if _RAW_BYTE.fullmatch(token) else len(token.replace(_METASPACE, " ").encode())


def _iterate_types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _iterate_types(part)

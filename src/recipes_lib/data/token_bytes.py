"""How many bytes of text each token stands for: where tokens end in a text, and how long a text its tokens are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from recipes_lib.data.masking import MergedTokenError

_RAW_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_METASPACE = "\u2581"


def compute_token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.int64] | None:
    """Bytes of UTF-8 that each id decodes to, ``int64 (V,)``; a special token stands for its own text.

    The lengths of a text's tokens add up to the length of the text, whatever the tokens cut through. In
    SentencePiece-style vocabularies the space in front of the first word counts, although decoding drops it.

    Returns:
        ``None`` for a tokenizer that does not keep its text (WordPiece), or that has no fast implementation.

    Source: the decoders of the ``tokenizers`` library; ``tests/data/test_token_bytes.py``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoders = set(_iterate_types(json.loads(backend.to_str())["decoder"]))
    if "ByteLevel" not in decoders and not decoders & {"ByteFallback", "Metaspace"}:
        return None
    lengths = np.zeros(len(tokenizer), dtype=np.int64)
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

    def find(self, ids: npt.NDArray[np.uint32], text: str) -> npt.NDArray[np.int64] | None:
        """The byte of ``text`` at which each token ends, ``int64 (T,)``; ``None`` if the tokens are not all of it."""
        ends = self._lengths[ids].cumsum()
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return ends if (int(ends[-1]) if len(ends) else 0) == num_bytes else None


def count_tokens_before_byte(ends: npt.NDArray[np.int64], text: str, character: int) -> int:
    """Number of tokens that lie before a character: the index of the first token on its right.

    Args:
        ends: From ``ByteEnds.find``.
        text: The whole text.
        character: The boundary, an index into ``text``.

    Raises:
        MergedTokenError: A token has characters on both sides.
    """
    at = character if text.isascii() else len(text[:character].encode())
    count = int(ends.searchsorted(at, side="right"))
    left = int(ends[count - 1]) if count else 0
    if left == at:
        return count
    data = text.encode()
    start, end = (len(data[:byte].decode(errors="ignore")) for byte in (left, int(ends[count])))
    raise MergedTokenError(start, max(end, character + 1))


def _count_bytes(token: str) -> int:
    return 1 if _RAW_BYTE.fullmatch(token) else len(token.replace(_METASPACE, " ").encode())


def _iterate_types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _iterate_types(part)

"""The ignore index of labels, and the boundaries between tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tokenizers import Encoding

IGNORE_INDEX: Final = -100
"""Label of positions without a target; the default ``ignore_index`` of PyTorch's cross-entropy."""


class MergedTokenError(ValueError):
    """A token has characters on both sides of a boundary; names both parts.

    Attributes:
        is_space: True if both parts are white space.
    """

    def __init__(self, before: str, after: str) -> None:
        super().__init__(f"one token holds {before!r} and {after!r}")
        self.is_space = before.isspace() and after.isspace()


def count_tokens_before(encoding: Encoding, text: str, character: int, special_ids: Collection[int]) -> int:
    """Return the number of tokens before a character boundary.

    Special tokens can absorb adjacent white space (``lstrip``, ``rstrip``); absorbed white space belongs to them.

    Args:
        encoding: Tokenisation of ``text``.
        text: The full text.
        character: Boundary, as an index into ``text``.
        special_ids: Ids of special tokens.

    Raises:
        MergedTokenError: A token has characters on both sides of the boundary.
    """
    token = None
    for at in range(character, len(text)):
        token = encoding.char_to_token(at)
        if token is not None:  # Normalisers and pre-tokenisers can drop characters, which have no token.
            break
    if token is None:
        return len(encoding)
    start, end = encoding.token_to_chars(token) or (character, character)
    if start >= character:
        return token
    if encoding.ids[token] in special_ids:
        if text[character:end].isspace():
            return token + 1
        if text[start:character].isspace():
            return token
    raise MergedTokenError(text[start:character], text[character:end])

"""Tokenisation of long texts in windows, with the tokens of one call."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple

from tokenizers import Encoding, Tokenizer
from tokenizers.models import Unigram

WINDOW: Final = 1 << 18
"""Characters that are tokenised at once, because ``tokenizers`` takes about 150 bytes of memory for each."""

_OVERLAP: Final = 1 << 12
"""Characters at the end of a window that the next one begins with."""


class Piece(NamedTuple):
    """Consecutive tokens of a text: tokens ``first:last`` of a window.

    Attributes:
        encoding: Tokens of the window.
        text: Text of the window.
        start: First character of the window.
        first: First token.
        last: Token after the last one.
        stop: Character at which token ``last`` starts.
    """

    encoding: Encoding
    text: str
    start: int
    first: int
    last: int
    stop: int


def encode_in_windows(tokenizer: Tokenizer, text: str) -> Iterator[Piece]:
    """Yield the tokens of a text in pieces: those of one call, with memory for a window instead of the whole text.

    Tokens near the edges of a window can differ from those of the text. Two windows are joined within their overlap,
    where both have the same tokens and words at the same characters: there, the effects of both edges are over. If
    there is no such place, the first window is doubled.

    Source: the tokens of one call, ``tests/data/test_windows.py``.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    # Unigram models choose among splits of a word with equal scores by rounding errors, which add up from its start.
    joins_in_words = not isinstance(tokenizer.model, Unigram)
    start, first, window = 0, 0, text[:WINDOW]
    left = encode(window)
    while start + len(window) < len(text):
        size = len(window)
        head = _list_tokens(left, 0, size - _OVERLAP, size - _OVERLAP // 4)
        # At the start of a word if there is one, so that both windows divide a long number alike.
        shift = next((token.start for token in head if token.starts_word), head[0].start if head else size)
        next_window = text[start + shift : start + shift + WINDOW]
        right = encode(next_window)
        tail = _list_tokens(right, shift, shift, size - _OVERLAP // 4)
        pairs = zip(reversed(head), reversed(tail), strict=False)
        shared = list(takewhile(lambda pair: pair[0][1:] == pair[1][1:], pairs))
        while shared and not (joins_in_words or shared[-1][0].starts_word):
            shared.pop()
        if not shared or shared[-1][0].start > size - _OVERLAP // 2:
            window = text[start : start + 2 * size]
            left = encode(window)
            continue
        last, next_first = shared[-1]
        yield Piece(left, window, start, first, last.number, start + last.start)
        left, window, start, first = right, next_window, start + shift, next_first.number
    yield Piece(left, window, start, first, len(left), len(text))


class _Token(NamedTuple):
    number: int
    id: int
    start: int
    end: int
    starts_word: bool


def _list_tokens(encoding: Encoding, shift: int, start: int, stop: int) -> list[_Token]:
    """Return the tokens within characters ``start:stop``, for an encoding that begins at character ``shift``."""
    # One by one: the lists of all words and offsets take a fifth of the time of tokenisation.
    ids, span, word = encoding.ids, encoding.token_to_chars, encoding.token_to_word
    first = bisect_left(range(len(ids)), start - shift, key=lambda at: (span(at) or (0, 0))[0])
    last = bisect_right(range(len(ids)), stop - shift, key=lambda at: (span(at) or (0, 0))[1])
    spans = [span(at) or (0, 0) for at in range(first, last)]
    return [
        _Token(at, ids[at], begin + shift, end + shift, at == 0 or word(at) != word(at - 1))
        for at, (begin, end) in enumerate(spans, first)
    ]

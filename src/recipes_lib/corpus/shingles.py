"""Words, n-grams and MinHash signatures of a text as arrays of hashes, without a Python object for each word.

A word is a run of letters, digits and underscores in lower case; where a script writes no spaces, a character.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

HashArray = npt.NDArray[np.uint64]
ShingleArray = npt.NDArray[np.uint32]

_PIECE: Final = 1 << 20
"""Characters hashed at once: some 40 bytes of memory each."""
_FACTOR: Final = 0x9E3779B97F4A7C15
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
_UNSPACED: Final = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF))
"""Thai and Lao, Burmese, Khmer, kana, and Chinese characters of the first plane."""
_MAX_CODE: Final = 0xFFFF
"""Characters beyond the first plane, mostly emoji, are no words."""


class Words(NamedTuple):
    """The words of a text.

    Attributes:
        hashes: ``uint64 (W,)``.
        starts: ``int64 (W,)``; where each begins, in characters.
        ends: ``int64 (W,)``; where each ends, exclusive.
    """

    hashes: HashArray
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64], HashArray, HashArray]:
    """Class of a character (0: none, 1: of a word, 2: a word by itself), its folded code, powers and their inverses."""
    kinds = np.zeros(_MAX_CODE + 1, np.uint8)
    folded = np.zeros(_MAX_CODE + 1, np.uint64)
    for code in range(_MAX_CODE):
        char = chr(code)
        if re.match(r"\w", char):
            compatible = unicodedata.normalize("NFKC", char).lower()
            kinds[code], folded[code] = 1, ord(compatible if len(compatible) == 1 else char)
    for first, last in _UNSPACED:
        kinds[first : last + 1] *= 2
    powers = np.full(_PIECE + 1, _FACTOR, np.uint64)
    inverses = np.full(_PIECE + 1, pow(_FACTOR, -1, 1 << 64), np.uint64)
    powers[0] = inverses[0] = 1
    return kinds, folded, np.cumprod(powers), np.cumprod(inverses)


def hash_words(text: str) -> Words:
    """Return the words of a text: hashes without regard to case and compatibility forms, and their places."""
    pieces = [_hash_piece(codes, start) for start, codes in _cut(text)]
    if len(pieces) == 1:
        return pieces[0]
    return Words(*(np.concatenate(parts) for parts in zip(*pieces, strict=True)))


def _cut(text: str) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Yield the text as code points, in pieces that end where a word does."""
    kinds, start = _tables()[0], 0
    while True:
        piece = text[start : start + _PIECE]
        codes = np.minimum(np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32), _MAX_CODE)
        if start + len(codes) < len(text):
            outside = np.flatnonzero(kinds[codes] != 1)
            # One word of a million characters is cut like any other place.
            codes = codes[: int(outside[-1]) + 1] if len(outside) else codes
        yield start, codes
        start += len(codes)
        if start >= len(text):
            return


def _hash_piece(codes: npt.NDArray[np.uint32], offset: int) -> Words:
    kinds, folded, powers, inverses = _tables()
    kind = kinds[codes]
    padded = np.concatenate(([np.uint8(0)], kind, [np.uint8(0)]))
    alone, before, after = kind == 2, padded[:-2], padded[2:]
    starts = np.flatnonzero((kind > 0) & ((before != 1) | alone))
    ends = np.flatnonzero((kind > 0) & ((after != 1) | alone)) + 1
    # A word's hash is a polynomial in its codes, by differences of prefix sums modulo 2^64.
    prefix = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(folded[codes] * powers[: len(codes)], out=prefix[1:])
    hashes = (prefix[ends] - prefix[starts]) * inverses[starts]
    return Words(_mix(hashes), starts + offset, ends + offset)


def _mix(hashes: HashArray) -> HashArray:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(29))


def hash_ngrams(words: HashArray, size: int) -> HashArray:
    """Return the hash of every run of ``size`` words, ``uint64 (max(W - size + 1, 0),)``, in order."""
    num = max(len(words) - size + 1, 0)
    hashes = words[:num].copy()
    for shift in range(1, size):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_FACTOR) + words[shift : num + shift]
    return _mix(hashes)


def hash_shingles(text: str, size: int) -> ShingleArray:
    """Return 32-bit hashes of the n-grams of a text, in order and with repetitions; none when it is shorter.

    Two documents of n distinct n-grams share about n^2 / 2^32 of these by chance, a share of n / 2^32.
    """
    return (hash_ngrams(hash_words(text).hashes, size) >> np.uint64(32)).astype(np.uint32)


class MinHash:
    """MinHash signatures, as keys of their bands.

    Source: Broder 1997; hash functions a x + b modulo 2^32. ``tests/corpus/test_shingles.py`` holds the share of equal
    keys against 1 - (1 - s^rows)^bands.
    """

    def __init__(self, bands: int, rows: int, seed: int) -> None:
        """Draw ``bands * rows`` hash functions."""
        random = np.random.default_rng(seed)
        # An odd factor: x -> a x + b is a permutation.
        self._factors = (random.integers(0, 1 << 32, bands * rows, np.uint64) | np.uint64(1)).astype(np.uint32)
        self._offsets = random.integers(0, 1 << 32, bands * rows, np.uint64).astype(np.uint32)[:, None]
        self.bands, self.rows = bands, rows

    def compute_keys(self, shingles: ShingleArray) -> HashArray:
        """Return the key of each band, ``uint64 (bands,)``: equal where all rows of the band are."""
        minima = np.full(self.bands * self.rows, (1 << 32) - 1, np.uint32)
        # In blocks that stay in the cache, so that memory does not grow with the document.
        block = max(1, (1 << 20) // len(minima))
        for start in range(0, len(shingles), block):
            values = np.multiply.outer(self._factors, shingles[start : start + block])
            values += self._offsets
            np.minimum(minima, values.min(axis=1), out=minima)
        # The bands of a row side by side: one run of ``rows`` words for each band would be as many small arrays.
        keys = np.zeros(self.bands, np.uint64)
        for row in _mix(minima.reshape(self.bands, self.rows).T.astype(np.uint64)):
            keys = _mix(keys * np.uint64(_FACTOR) + row)
        return keys


def compute_jaccard(first: ShingleArray, second: ShingleArray) -> float:
    """Return the Jaccard similarity of two sets, each sorted and without repetitions; 0 of two empty ones."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - shared
    return shared / union if union else 0.0

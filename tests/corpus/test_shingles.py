"""Word and n-gram hashes against regular expressions, and MinHash against its S-curve."""

import random
import re
import unicodedata

import numpy as np
import pytest
from tests.corpus.texts import ENGLISH, make_text

from recipes_lib.corpus import duplicates
from recipes_lib.corpus.duplicates import MinHash, compute_jaccard, hash_ngrams, hash_shingles, hash_words


def test_word_spans_match_regular_expression():
    for text in (ENGLISH, "", "...", "a", "naïve Ärger, 3.14 and _x1!", "x" * 5000, "one\n\ntwo\tthree"):
        words = hash_words(text)
        expected = [match.span() for match in re.finditer(r"\w+", text)]
        assert list(zip(words.starts.tolist(), words.ends.tolist(), strict=True)) == expected


def test_word_hashes_are_equal_iff_normalised_words_are():
    words = [make_text(random.Random(seed), 1) for seed in range(3000)]
    hashes = hash_words(" ".join(words)).hashes.tolist()
    assert len(set(hashes)) == len(set(words))
    assert hash_words("Hello WORLD").hashes.tolist() == hash_words("(hello) ... world!").hashes.tolist()
    assert hash_words("ab ba").hashes[0] != hash_words("ab ba").hashes[1]
    wide = unicodedata.normalize("NFKC", "ＡＢＣ１２")
    assert hash_words("ＡＢＣ１２").hashes.tolist() == hash_words(wide).hashes.tolist()


def test_cjk_characters_are_single_words():
    assert len(hash_words("東京都に住む").hashes) == 6
    assert len(hash_words("GPU東京").hashes) == 3


def test_combining_marks_belong_to_their_word():
    for text in ("हिन्दी भाषा", "தமிழ் மொழி", "كَتَبَ وَلَد", "שָׁלוֹם עוֹלָם", "cafe\u0301 au lait\u0301"):
        words = hash_words(text)
        spans = zip(words.starts.tolist(), words.ends.tolist(), strict=True)
        assert [text[start:end] for start, end in spans] == text.split()
    assert hash_words("की").hashes != hash_words("का").hashes
    assert len(hash_words("ภาษาไทย").hashes) == 7
    assert len(hash_words("ที่นี่").hashes) == 2  # Combining marks are ignored in scripts without spaces.
    assert len(hash_words("\u2764\ufe0f 1\ufe0f\u20e3").hashes) == 1


def test_hash_words_is_independent_of_piece_size(monkeypatch):
    text = " ".join([ENGLISH, "東京都", "x" * 40] * 5)
    whole = hash_words(text)
    duplicates._tables.cache_clear()
    monkeypatch.setattr(duplicates, "_PIECE", 101)
    pieces = hash_words(text)
    duplicates._tables.cache_clear()
    for ours, theirs in zip(whole, pieces, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_ngram_hash_depends_on_word_order():
    words = hash_words("a b c d e a b c x").hashes
    trigrams = hash_ngrams(words, 3).tolist()
    assert trigrams[0] == trigrams[5]
    assert len(set(trigrams)) == len(trigrams) - 1
    assert hash_ngrams(hash_words("b a").hashes, 2).tolist() != hash_ngrams(hash_words("a b").hashes, 2).tolist()
    assert len(hash_ngrams(words[:2], 3)) == 0


def test_compute_jaccard_matches_sets():
    first, second = (np.unique(hash_shingles(text, 2)) for text in ("a b c d", "b c d e"))
    assert compute_jaccard(first, second) == pytest.approx(2 / 4)
    assert compute_jaccard(first[:0], first[:0]) == 0


def make_pair(random_: np.random.Generator, similarity: float, size: int = 400):
    """Return two sets with the given Jaccard similarity."""
    shared = round(similarity * size)
    values = random_.choice(1 << 32, size, replace=False).astype(np.uint32)
    half = shared + (size - shared) // 2
    return values[:half], np.concatenate([values[:shared], values[half:]])


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_minhash_candidates_follow_s_curve(similarity):
    random_ = np.random.default_rng(0)
    num, bands, rows = 400, 14, 8
    minhash = MinHash(bands, rows, seed=1)
    found = 0
    for _ in range(num):
        first, second = make_pair(random_, similarity)
        found += bool((minhash.compute_keys(first) == minhash.compute_keys(second)).any())
    expected = 1 - (1 - similarity**rows) ** bands
    # 0.03: hash functions a x + b are not fully independent.
    assert abs(found / num - expected) < 4 * np.sqrt(expected * (1 - expected) / num) + 0.03


def test_minhash_keys_ignore_order_and_repetition():
    values = np.random.default_rng(0).integers(0, 1 << 32, 30_000).astype(np.uint32)
    minhash = MinHash(14, 8, seed=1)
    keys = minhash.compute_keys(values)
    assert keys.tolist() == minhash.compute_keys(np.concatenate([values[::-1], values])).tolist()
    assert keys.tolist() != MinHash(14, 8, seed=2).compute_keys(values).tolist()

"""Filters of generated rows (refusal, length, language, agreement, near duplicate), and selection of diverse rows."""

from __future__ import annotations

import heapq
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.corpus.duplicates import MinHash, hash_shingles, hash_words
from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.errors import ConfigError, Problem, verify_extra
from recipes_lib.files import read_text

REFUSALS: Final = Path(__file__).with_name("refusals.txt")
_NGRAM: Final = 3
"""Words of a shingle, few because prompts are short."""
_NUM_HASHES: Final = 128

Check = Callable[[str], str | None]
"""Filter of a text: returns the reason of its removal, ``None`` to keep it."""


def build_checks(config: SynthesisConfig) -> list[Check]:
    """Return the filters of single answers, cheap ones first.

    Raises:
        ConfigError: A refusal pattern is invalid, or the packages for language identification are not installed.
        DataError: The file of refusal patterns cannot be read.
    """
    checks: list[Check] = [_build_length_check(config)]
    if config.drop_refusals:
        checks.append(_build_refusal_check(Path(config.refusals_path) if config.refusals_path else REFUSALS))
    if config.languages:
        checks.append(_build_language_check(config.languages, config.language_threshold))
    return checks


def _build_length_check(config: SynthesisConfig) -> Check:
    def check(text: str) -> str | None:
        count = len(hash_words(text).hashes)
        if count < config.min_words:
            return "too short"
        return "too long" if config.max_words is not None and count > config.max_words else None

    return check


def _build_refusal_check(path: Path) -> Check:
    text = read_text(path, "refusals_path", "name a text file")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    patterns = []
    for number, line in enumerate(lines, 1):
        try:
            patterns.append(re.compile(line, re.IGNORECASE))
        except re.error as error:
            problem = Problem(f"{path}:{number}", f"is not a regular expression: {error}", "correct it")
            raise ConfigError(problem) from error

    def check(text: str) -> str | None:
        # Only at the beginning of an answer: inside one, such words are usually quoted.
        begin = text.lstrip(" \n\t*#>\"'")
        return "refusal" if any(pattern.match(begin) for pattern in patterns) else None

    return check


def _build_language_check(languages: list[str], threshold: float) -> Check:
    verify_extra("languages", "corpus", "datatrove")
    from recipes_lib.corpus.text_steps import Language

    step = Language(languages, threshold, {}, None)

    def check(text: str) -> str | None:
        document: Any = SimpleNamespace(text=text, metadata={})
        return "language" if step.apply(document, Counter()) is not None else None

    check("")  # Loads the model, so that a missing one is an error before any request.
    return check


def find_agreeing(texts: Sequence[str]) -> list[int]:
    """Return the indices of the answers with the most common result.

    The result of an answer is its final number, else its last line without case, punctuation and spaces.
    """
    results = [_read_result(text) for text in texts]
    ((result, _),) = Counter(results).most_common(1)
    return [at for at, one in enumerate(results) if one == result]


def _read_result(text: str) -> str:
    number = read_final_number(text)
    last = text.strip().rpartition("\n")[2]
    return str(number.normalize()) if number is not None else "".join(re.findall(r"\w+", last.casefold()))


def _shingle(text: str) -> Any:
    """Return the shingles of a text; its words if it is shorter than a shingle."""
    shingles = hash_shingles(text, _NGRAM)
    return shingles if len(shingles) else hash_shingles(text, 1)


class NearDuplicates:
    """Index of texts that detects near duplicates by the Jaccard similarity of their shingles.

    Exact, from an inverted index, without MinHash candidates: prompts of one template all have candidates in common,
    and comparing them pair by pair takes a day for 100,000. Texts that are shorter than a shingle are duplicates if
    their words are equal.

    Source: brute force over all pairs in ``tests/commands/generated/test_row_filters.py``.
    """

    def __init__(self, threshold: float) -> None:
        """Create an empty index; texts with at least this Jaccard similarity are duplicates."""
        self._threshold = threshold
        # Shingle -> numbers of the texts that contain it; text -> number of its shingles.
        self._texts: dict[int, array[int]] = {}
        self._sizes = array("I")
        self._words: set[bytes] = set()

    def add(self, text: str) -> bool:
        """Return whether a text is a near duplicate of an earlier one; if not, add it to the index."""
        words = hash_words(text).hashes.tobytes()
        # Equal words first, because this is cheaper than shingles.
        if words in self._words:
            return True
        shingles = set(hash_shingles(text, _NGRAM).tolist())
        if texts := [self._texts[shingle] for shingle in shingles if shingle in self._texts]:
            shared = np.bincount(np.concatenate(texts))
            sizes = np.array(self._sizes[: len(shared)])
            if (shared / (len(shingles) + sizes - shared) >= self._threshold).any():
                return True
        self._words.add(words)
        for shingle in shingles:
            self._texts.setdefault(shingle, array("I")).append(len(self._sizes))
        self._sizes.append(len(shingles))
        return False


def choose_rows(texts: Sequence[str], scores: Sequence[float | None], num_rows: int, diversity: float) -> list[int]:
    """Return the indices of the selected rows, in ascending order.

    Greedy: each step selects the row with the highest ``(1 - diversity) * quality - diversity * similarity``, where
    quality is the rank of the score scaled to [0, 1], and similarity the largest estimated Jaccard similarity to a
    selected row.

    Args:
        texts: Texts of the rows, for their similarity.
        scores: Scores of the rows; ``None`` ranks lowest.
        num_rows: Maximum number of selected rows.
        diversity: Weight in [0, 1]: 0 selects by score alone, 1 by dissimilarity alone.

    Source: maximal marginal relevance (Carbonell and Goldstein 1998).
    """
    minhash = MinHash(_NUM_HASHES, rows=1, seed=0)
    # With bands of one row, the share of equal keys estimates the Jaccard similarity. Shape (rows, hashes).
    keys = [minhash.compute_keys(_shingle(text)) for text in texts]
    signatures = np.array(keys, np.uint64).reshape(len(texts), _NUM_HASHES)
    known = np.array([-np.inf if score is None else score for score in scores])
    ordered = np.unique(known)
    # Ranks instead of scores, so that the weight does not depend on the scale of the grades.
    quality = np.searchsorted(ordered, known) / max(1, len(ordered) - 1)
    similarity, chosen = np.zeros(len(texts)), list[int]()

    def rank(row: int) -> tuple[float, int]:
        return float(diversity * similarity[row] - (1 - diversity) * quality[row]), row

    # The objective of a row never increases, so that an outdated rank is a bound: only the first row is ranked again.
    queue = [rank(row) for row in range(len(texts))]
    heapq.heapify(queue)
    groups = _group_equal_keys(signatures)
    while queue and len(chosen) < num_rows:
        first = heapq.heappop(queue)
        if (now := rank(first[1])) != first:
            heapq.heappush(queue, now)
            continue
        chosen.append(first[1])
        if shared := groups[first[1]]:
            num_equal = np.bincount(np.concatenate(shared), minlength=len(texts))
            np.maximum(similarity, num_equal / _NUM_HASHES, out=similarity)
    return sorted(chosen)


def _group_equal_keys(signatures: Any) -> list[list[Any]]:
    """Return, for each row, the rows with the same key: one array per hash whose key is not unique."""
    groups: list[list[Any]] = [[] for _ in signatures]
    for keys in signatures.T:
        order = np.argsort(keys, kind="stable")
        bounds = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]], append=~keys[order[-1:]]))
        for at in np.flatnonzero(np.diff(bounds) > 1):
            members = order[bounds[at] : bounds[at + 1]]
            for row in members:
                groups[row].append(members)
    return groups

"""Filters and selection of generated rows: refusals, length, language, agreement, near duplicates, best and diverse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.corpus.duplicates import MinHash, compute_jaccard, hash_shingles, hash_words
from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.errors import ConfigError, DataError, Problem, verify_extra

REFUSALS: Final = Path(__file__).with_name("refusals.txt")
_NGRAM: Final = 3
"""Words of a shingle: prompts are short."""
_BANDS, _ROWS = 32, 4
"""Finds pairs with a similarity of 0.7 with a probability of 0.9998, of 0.5 with 0.87; each is verified exactly."""
_NUM_HASHES: Final = 128
_SEED: Final = 0

Check = Callable[[str], str | None]
"""Returns why a text is removed; ``None`` where it is kept."""


def build_checks(config: SynthesisConfig) -> list[Check]:
    """Return the checks of single answers, cheap ones first.

    Raises:
        ConfigError: A refusal is no regular expression, or what identifies languages is not installed.
        DataError: The file of refusals cannot be read.
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
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(Problem(str(path), f"cannot be read: {error}", "name a text file")) from error
    patterns = []
    for number, line in enumerate(lines, 1):
        try:
            patterns.append(re.compile(line, re.IGNORECASE))
        except re.error as error:
            raise ConfigError(
                Problem(f"{path}:{number}", f"is no regular expression: {error}", "correct it")
            ) from error

    def check(text: str) -> str | None:
        # Refusals open an answer; the same words inside one are a quotation or a story.
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

    check("")  # A model that is missing is told before anything is written.
    return check


def find_agreeing(texts: Sequence[str]) -> list[int]:
    """Return which answers have the most common result.

    A result is the final number, or without one the last line, without case, punctuation and spaces.
    """
    results = [_read_result(text) for text in texts]
    ((result, _),) = Counter(results).most_common(1)
    return [at for at, one in enumerate(results) if one == result]


def _read_result(text: str) -> str:
    number = read_final_number(text)
    last = text.strip().rpartition("\n")[2]
    return str(number.normalize()) if number is not None else "".join(re.findall(r"\w+", last.casefold()))


def _shingle(text: str) -> Any:
    """Shingles of a text; the words of one that is shorter than a shingle."""
    shingles = hash_shingles(text, _NGRAM)
    return shingles if len(shingles) else hash_shingles(text, 1)


class NearDuplicates:
    """Texts that were seen; a text is a duplicate of an earlier one by the exact similarity of their shingles.

    MinHash finds the candidates (``corpus.duplicates``). Texts shorter than a shingle are compared by their words.

    Source: brute force over all pairs in ``tests/commands/generated/test_row_filters.py``.
    """

    def __init__(self, threshold: float) -> None:
        """Start without a text; ``threshold`` is a Jaccard similarity."""
        self._threshold = threshold
        self._minhash = MinHash(_BANDS, _ROWS, _SEED)
        self._buckets: dict[tuple[int, int], list[int]] = {}
        self._shingles: list[Any] = []
        self._words: set[bytes] = set()

    def add(self, text: str) -> bool:
        """Return whether it repeats an earlier text; one that does not is compared with later ones."""
        words = hash_words(text).hashes.tobytes()
        # Equal words first: exact, and cheaper than shingles.
        if words in self._words:
            return True
        shingles = np.unique(hash_shingles(text, _NGRAM))
        buckets: list[tuple[int, int]] = []
        if len(shingles):
            buckets = list(enumerate(self._minhash.compute_keys(shingles).tolist()))
            candidates = sorted({at for bucket in buckets for at in self._buckets.get(bucket, ())})
            if any(compute_jaccard(self._shingles[at], shingles) >= self._threshold for at in candidates):
                return True
        self._words.add(words)
        for bucket in buckets:
            self._buckets.setdefault(bucket, []).append(len(self._shingles))
        if buckets:
            self._shingles.append(shingles)
        return False


def choose_rows(texts: Sequence[str], scores: Sequence[float | None], num_rows: int, diversity: float) -> list[int]:
    """Return the places of the best rows, in order of their place.

    Greedy: each time the row with the most of ``(1 - diversity) * quality - diversity * similarity``, where quality is
    the rank of the score from 0 to 1, and similarity the largest estimated Jaccard similarity to a chosen row.

    Args:
        texts: By which rows are similar.
        scores: ``None`` ranks lowest.
        num_rows: At most this many.
        diversity: 0 is the best alone, 1 the most different alone.

    Source: maximal marginal relevance (Carbonell and Goldstein 1998).
    """
    minhash = MinHash(_NUM_HASHES, 1, _SEED)
    # Bands of one row: the share of equal keys estimates the Jaccard similarity.
    signatures = np.stack([minhash.compute_keys(_shingle(text)) for text in texts]) if texts else None
    known = np.array([-np.inf if score is None else score for score in scores])
    ordered = np.unique(known)
    # Ranks, so that grades of any scale weigh as much against similarity.
    quality = np.searchsorted(ordered, known) / max(1, len(ordered) - 1)
    similarity, chosen = np.zeros(len(texts)), list[int]()
    is_left = np.ones(len(texts), bool)
    while len(chosen) < min(num_rows, len(texts)) and signatures is not None:
        worth = (1 - diversity) * quality - diversity * similarity
        best = int(np.argmax(np.where(is_left, worth, -np.inf)))
        is_left[best] = False
        chosen.append(best)
        similarity = np.maximum(similarity, (signatures == signatures[best]).mean(axis=1))
    return sorted(chosen)

"""Quality: Gopher, C4 and FineWeb rules of datatrove with explicit thresholds by kind, and perplexity buckets."""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.word_tokenizers import WordTokenizer

from recipes_lib.config.corpus_keys import PERPLEXITY_BUCKETS
from recipes_lib.corpus.duplicates import COMBINING_MARKS
from recipes_lib.errors import ConfigError, Problem

Score = Callable[[str], float | None]
"""Returns the bits per byte of a text; ``None`` if it is too short for the model to predict a token."""
LoadScorer = Callable[[str], Score]
"""Loads a model from a path. A module-level function, because worker processes unpickle it."""
Thresholds = Mapping[str, Any]

PRESETS: Final[Mapping[str, Mapping[str, Thresholds]]] = yaml.safe_load(
    Path(__file__).with_name("quality.yaml").read_text(encoding="utf-8")
)
"""Kind of source -> filter -> its thresholds."""

# A URL, or a run of dashes or full stops, is one word, as for spaCy, which datatrove uses for English: as several ones,
# they would count as repetition and as words without letters. It ends before Chinese or Japanese text, which follows
# without a space. Marks are matched after letters only, so that texts without marks take hardly more time.
_WORD: Final = re.compile(rf"\w+://[!-~]+|\w+(?:[{COMBINING_MARKS}]+\w*|['’-]\w+)*|--+|\.\.+|[^\w\s]")
# No space follows a sentence in Chinese and Japanese.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])(?![。！？])[\"'”’)\]」』）]*\s*")


class RegexTokenizer(WordTokenizer):  # type: ignore[misc]
    """Words and sentences by regular expressions; datatrove's own tokenizers need spaCy, or download models."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and punctuation marks."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences."""
        return [sentence for sentence in _SENTENCE_END.split(text) if sentence.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return start and end (exclusive) of each sentence, in characters."""
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        return list(zip([0, *ends], [*ends, len(text)], strict=True))


class CodeQualityFilter:
    """Rules of the StarCoder dataset: longest line, average line length, share of letters and digits.

    Source: Li et al. 2023 (StarCoder).
    """

    def __init__(self, max_line_length: int, max_avg_line_length: float, min_alnum_ratio: float, **_: Any) -> None:
        """Store the limits; lengths are in characters. Further arguments are those of datatrove's filters."""
        self.max_line, self.max_avg, self.min_alnum = max_line_length, max_avg_line_length, min_alnum_ratio

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return True to keep a file, or False and the reason."""
        lengths = [len(line) for line in document.text.splitlines()]
        if max(lengths) > self.max_line:
            return False, "line_too_long"
        if sum(lengths) / len(lengths) > self.max_avg:
            return False, "lines_too_long"
        alnum = sum(map(str.isalnum, document.text))
        return True if alnum >= self.min_alnum * len(document.text) else (False, "few_letters")


_FILTERS: Final[Mapping[str, type]] = {
    "gopher_repetition": GopherRepetitionFilter,
    "gopher_quality": GopherQualityFilter,
    "c4_quality": C4QualityFilter,
    "fineweb_quality": FineWebQualityFilter,
    "code_quality": CodeQualityFilter,
}


class Quality:
    """Quality filters, applied in order."""

    name = "quality"

    def __init__(self, thresholds: Mapping[str, Thresholds]) -> None:
        """Build the filters from their thresholds; all split words by ``RegexTokenizer``."""
        tokenizer = RegexTokenizer()
        self._filters: list[tuple[str, BaseFilter]] = [
            (name, _FILTERS[name](**values, language=tokenizer)) for name, values in thresholds.items()
        ]

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Return the first violated rule; the C4 filter also removes single lines."""
        for name, quality_filter in self._filters:
            if not document.text:  # The C4 filter has removed all lines; other filters divide by the number of words.
                return None
            # datatrove's filters return a boolean, or a pair of a boolean and the reason.
            keeps, reason = get_filter_result(quality_filter.filter(document))
            if not keeps:
                return f"{name} {reason}"
        return None


def choose_thresholds(kind: str, changes: Mapping[str, Any] | None) -> dict[str, Thresholds]:
    """Return the filters of a kind of source with their thresholds, overridden by ``quality_thresholds``.

    Raises:
        ConfigError: ``changes`` names a kind, filter or threshold that does not exist.
    """
    problems = []
    chosen = {kind: dict(preset) for kind, preset in PRESETS.items()}
    for name, filters in (changes or {}).items():
        if name not in PRESETS or not isinstance(filters, Mapping):
            problems.append(_refuse(f"`{name}` is not a kind of source with filters", PRESETS))
            continue
        for filter_name, values in filters.items():
            known = next((preset[filter_name] for preset in PRESETS.values() if filter_name in preset), None)
            if known is None:
                problems.append(_refuse(f"{name}: there is no filter `{filter_name}`", _FILTERS))
            elif values in ("off", False):
                chosen[name].pop(filter_name, None)
            elif (name, filter_name) == ("chat", "c4_quality"):
                others = [other for other in _FILTERS if other != filter_name]
                problems.append(_refuse("chat: c4_quality removes lines, also those of messages", others))
            elif not isinstance(values, Mapping) or values.keys() - known.keys():
                problems.append(_refuse(f"{name}.{filter_name}: {values} are not thresholds of this filter", known))
            else:
                chosen[name][filter_name] = {**chosen[name].get(filter_name, known), **values}
    if problems:
        raise ConfigError(*problems)
    return chosen[kind]


def _refuse(found: str, known: Iterable[str]) -> Problem:
    return Problem("quality_thresholds", found, f"write some of {', '.join(known)}")


@functools.cache
def _load(load: LoadScorer, path: str) -> Score:
    return load(path)


class Perplexity:
    """Perplexity filter: removes documents by their bits per byte under a language model.

    Source: Wenzek et al. 2020 (CCNet), section 3.4, whose buckets are thirds by perplexity per token. Bits per byte
    depend neither on the tokenizer nor on the length of a document.
    """

    name = "perplexity"

    def __init__(self, load: LoadScorer, path: str, bounds: Sequence[float], kept: Sequence[str]) -> None:
        """Store the arguments.

        Args:
            load: Function that loads the model, called once per process.
            path: Folder of the model.
            bounds: Bits per byte at which the buckets ``middle`` and ``tail`` begin; if empty, documents are only
                counted, in steps of 0.1 bits per byte.
            kept: Buckets to keep.
        """
        self._load, self._path, self._bounds, self._kept = load, path, bounds, kept

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Record bits per byte and bucket; remove documents of other buckets."""
        bits = _load(self._load, self._path)(document.text)
        if bits is None:
            found["too short"] += 1
            return None
        document.metadata["bits_per_byte"] = round(bits, 4)
        if not self._bounds:
            found[f"from {math.floor(bits * 10) / 10:.1f} bits per byte"] += 1
            return None
        # The bound itself belongs to the worse bucket.
        bucket = PERPLEXITY_BUCKETS[bisect.bisect_right(self._bounds, bits)]
        document.metadata["perplexity_bucket"] = bucket
        found[bucket] += 1
        return None if bucket in self._kept else f"bucket {bucket}"

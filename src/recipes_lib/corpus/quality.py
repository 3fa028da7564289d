"""Quality filters: datatrove's Gopher, C4 and FineWeb rules with visible thresholds, and a preset for each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.word_tokenizers import WordTokenizer

from recipes_lib.errors import ConfigError, Problem

Thresholds = Mapping[str, Any]

_REPETITION: Final[Thresholds] = {
    "dup_line_frac": 0.3,
    "dup_para_frac": 0.3,
    "dup_line_char_frac": 0.2,
    "dup_para_char_frac": 0.2,
    "top_n_grams": [[2, 0.2], [3, 0.18], [4, 0.16]],
    "dup_n_grams": [[5, 0.15], [6, 0.14], [7, 0.13], [8, 0.12], [9, 0.11], [10, 0.1]],
}
_GOPHER: Final[Thresholds] = {
    "min_doc_words": 50,
    "max_doc_words": 100_000,
    "min_avg_word_length": 3,
    "max_avg_word_length": 10,
    "max_symbol_word_ratio": 0.1,
    "max_bullet_lines_ratio": 0.9,
    "max_ellipsis_lines_ratio": 0.3,
    "max_non_alpha_words_ratio": 0.8,
    "min_stop_words": 2,
    "stop_words": None,
}
_C4: Final[Thresholds] = {
    "split_paragraph": True,
    "remove_citations": True,
    # FineWeb leaves this rule of C4 out: it alone removes a third of all text.
    "filter_no_terminal_punct": False,
    "min_num_sentences": 5,
    "min_words_per_line": -1,
    "max_word_length": 1000,
    "filter_lorem_ipsum": True,
    "filter_javascript": True,
    "filter_curly_bracket": True,
    "filter_policy": True,
}
_FINEWEB: Final[Thresholds] = {
    "line_punct_thr": 0.12,
    "line_punct_exclude_zero": False,
    "short_line_thr": 0.67,
    "short_line_length": 30,
    "char_duplicates_ratio": 0.01,
    "new_line_ratio": 0.3,
}
_CODE: Final[Thresholds] = {"max_line_length": 1000, "max_avg_line_length": 100, "min_alnum_ratio": 0.25}

PRESETS: Final[Mapping[str, Mapping[str, Thresholds]]] = {
    "text": {},
    "chat": {},
    "web": {
        "gopher_repetition": _REPETITION,
        "gopher_quality": _GOPHER,
        "c4_quality": _C4,
        "fineweb_quality": _FINEWEB,
    },
    # Books are long, and their lines are short.
    "books": {"gopher_repetition": _REPETITION, "gopher_quality": {**_GOPHER, "max_doc_words": None}},
    "code": {"code_quality": _CODE},
    # Formulas are short words with few letters, and repeat.
    "math": {
        "gopher_repetition": {**_REPETITION, "top_n_grams": [], "dup_n_grams": []},
        "gopher_quality": {
            **_GOPHER,
            "min_doc_words": 20,
            "min_avg_word_length": 1,
            "max_non_alpha_words_ratio": 0.4,
            "min_stop_words": None,
        },
    },
}
"""Kind of source -> filter -> thresholds. Those of ``web`` are FineWeb's."""

_WORD: Final = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?。！？])[\"'”’)\]]*\s+")


class RegexTokenizer(WordTokenizer):  # type: ignore[misc]
    """Words and sentences by regular expressions: no model to download."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and punctuation marks."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences."""
        return [sentence for sentence in _SENTENCE_END.split(text) if sentence.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return where the sentences stand."""
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        return list(zip([0, *ends], [*ends, len(text)], strict=True))


class CodeQualityFilter:
    """The rules of StarCoder's data: lines that people write, and some letters."""

    def __init__(self, max_line_length: int, max_avg_line_length: float, min_alnum_ratio: float, **_: Any) -> None:
        """Keep files within these."""
        self.max_line, self.max_avg, self.min_alnum = max_line_length, max_avg_line_length, min_alnum_ratio

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Judge a file."""
        lengths = [len(line) for line in document.text.splitlines()] or [0]
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
    """One after another, the filters of a kind of source."""

    name = "quality"

    def __init__(self, thresholds: Mapping[str, Thresholds]) -> None:
        """Build the filters; of rules that have a language, words are those of ``RegexTokenizer``."""
        tokenizer = RegexTokenizer()
        self._filters: list[tuple[str, BaseFilter]] = [
            (name, _FILTERS[name](**values, language=tokenizer)) for name, values in thresholds.items()
        ]

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Remove a document at the first rule that it breaks; C4 removes lines."""
        for name, quality_filter in self._filters:
            if not document.text.strip():
                return f"{name} nothing left"
            try:
                keeps, reason = get_filter_result(quality_filter.filter(document))
            except ZeroDivisionError:  # Of a text without a word.
                keeps, reason = False, "no words"
            if not keeps:
                return f"{name} {reason}"
        return None


def choose_thresholds(kind: str, changes: Mapping[str, Any] | None) -> dict[str, Thresholds]:
    """Return the filters of a kind with their thresholds, the user's where there are some.

    Raises:
        ConfigError: ``quality_thresholds`` names a kind, filter or threshold that there is not.
    """
    problems = []
    chosen = {kind: dict(preset) for kind, preset in PRESETS.items()}
    for name, filters in (changes or {}).items():
        if name not in PRESETS or not isinstance(filters, Mapping):
            problems.append(_refuse(f"`{name}` is no kind of source with filters", PRESETS))
            continue
        for filter_name, values in filters.items():
            known = next((preset[filter_name] for preset in PRESETS.values() if filter_name in preset), None)
            if known is None:
                problems.append(_refuse(f"{name}: there is no filter `{filter_name}`", _FILTERS))
            elif values in ("off", False):
                chosen[name].pop(filter_name, None)
            elif not isinstance(values, Mapping) or values.keys() - known.keys():
                problems.append(_refuse(f"{name}.{filter_name}: {values} are no thresholds of it", known))
            else:
                chosen[name][filter_name] = {**chosen[name].get(filter_name, known), **values}
    if problems:
        raise ConfigError(*problems)
    return chosen[kind]


def _refuse(found: str, known: Mapping[str, Any]) -> Problem:
    return Problem("quality_thresholds", found, f"write some of {', '.join(known)}")

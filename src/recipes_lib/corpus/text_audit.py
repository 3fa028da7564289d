"""Audit of a sample of training texts by the cleaning steps: duplicates, personal data, languages, benchmark items."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import Document

from recipes_lib.config.corpus_keys import PII_KINDS, CorpusConfig
from recipes_lib.corpus import duplicates
from recipes_lib.corpus.decontamination import Index
from recipes_lib.corpus.pii import mask
from recipes_lib.corpus.text_steps import MAX_CLASSIFIED, Language
from recipes_lib.errors import ConfigError
from recipes_lib.files import count_bytes
from recipes_lib.quantities import format_bytes, pluralize

MAX_DOCUMENTS: Final = 2000
"""Documents of a sample."""
MAX_BYTES: Final = 1 << 22
"""Size of a sample, in UTF-8 bytes."""
_SHARED_BY: Final = 10
"""Documents that have a line in common, from which on it is reported."""
_MIN_WORDS_FOR_LANGUAGE: Final = 8
"""Texts of at most this many words are too short for language identification."""
_MIN_LANGUAGE_SHARE: Final = 0.02
"""Share of the documents below which a language counts as an exception."""
# Patterns of UTF-8 decoded as Latin-1, replacement characters, and control characters.
_GARBLED: Final = re.compile("Ã[\x80-\xbf]|â€|\ufffd|[\x00-\x08\x0e-\x1f]")


@dataclass(frozen=True)
class Audit:
    """Findings in a sample.

    Attributes:
        facts: Size and languages of the sample.
        warnings: Defects that cleaning would remove.
    """

    facts: list[str]
    warnings: list[str]


def audit_texts(texts: Iterable[str], protected: Index | None = None, end: str | None = None) -> Audit:
    """Check the first ``MAX_DOCUMENTS`` texts, or ``MAX_BYTES`` of them.

    Args:
        texts: Texts in an order in which the first are representative; an unreadable document is an empty text.
        protected: Benchmark items that should not occur in the texts.
        end: Token that ends each document, which should not occur inside of one; ``None`` without it.
    """
    taken = list(_take(texts))
    sample = [text for text in taken if text.strip()]
    warnings = []
    if empty := len(taken) - len(sample):
        warnings.append(f"{_share(empty, taken)} are empty or cannot be read")
    if not sample:
        return Audit([], warnings)
    facts = [f"sample: {len(sample):,} documents, {format_bytes(sum(map(count_bytes, sample)))}"]
    warnings += [*_find_repeated(sample), *_find_personal(sample)]
    if garbled := sum(_GARBLED.search(text) is not None for text in sample):
        warnings.append(f"{_share(garbled, sample)} have garbled characters")
    if joined := sum(end in text.strip().removesuffix(end) for text in sample) if end else 0:
        warnings.append(
            f"{_share(joined, sample)} have the end of a document, {end}, inside: write one row for each part"
        )
    warnings += _find_languages(sample, facts)
    if protected is not None:
        hits = Counter(task for text in sample for task in {task for task, _, _ in protected.find(text)})
        warnings += [f"{_share(count, sample)} share words with {task}" for task, count in sorted(hits.items())]
    return Audit(facts, warnings)


def _find_languages(sample: list[str], facts: list[str]) -> Iterator[str]:
    """Append the languages, or why they are unknown, to ``facts``; yield warnings of several and of rare ones."""
    try:
        languages = count_languages(sample)
    except ConfigError as error:
        facts.append(f"languages: {error.problems[0].found}; {error.problems[0].remedy}")
        return
    shares = [(name, count / languages.total()) for name, count in languages.most_common()]
    most_common = ", ".join(f"{name} {share:.0%}" for name, share in shares[:5])
    if shares:
        facts.append(f"languages: {most_common}")
    if sum(share >= _MIN_LANGUAGE_SHARE for _, share in shares) > 1:
        yield f"languages are mixed: {most_common}; `languages` of recipes clean names those to keep"
    if few := sorted(name for name, share in shares if share < _MIN_LANGUAGE_SHARE):
        yield f"single documents are in other languages: {', '.join(few[:5])}"


def _take(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for number, text in enumerate(texts):
        if number == MAX_DOCUMENTS or size >= MAX_BYTES:
            return
        size += count_bytes(text)
        yield text


def _share(count: int, sample: list[str]) -> str:
    return f"{count:,} of {len(sample):,} documents ({count / len(sample):.1%})"


def count_languages(sample: list[str]) -> Counter[str]:
    """Return the number of texts in each language; short and uncertain ones are excluded."""
    step, languages = Language([], 0.0, {}, None), Counter[str]()
    for text in sample:
        # `maxsplit`: only whether there are more words matters, not how many. Some scripts have no spaces between them.
        words = text.split(maxsplit=_MIN_WORDS_FOR_LANGUAGE) + duplicates.UNSPACED.findall(text[:MAX_CLASSIFIED])
        if len(words) > _MIN_WORDS_FOR_LANGUAGE:
            document = Document(text=text, id="")
            step.apply(document, Counter())
            if document.metadata["language_score"] >= 0.65:
                languages[document.metadata["language"]] += 1
    return languages


def _find_repeated(sample: list[str]) -> Iterator[str]:
    """Yield warnings about duplicates, and about lines that many documents share."""
    # Through files, as in cleaning, so that the same code decides.
    config = CorpusConfig(repeated_lines="annotate")
    with tempfile.TemporaryDirectory() as folder:
        hashes = duplicates.Hashes(config)
        for text in sample:
            hashes.add(text)
        hashes.write(Path(folder), 0)
        table = duplicates.HashTable([duplicates.HashFolder(Path(folder), 1, "")])
        status = duplicates.find_duplicates(table, config).status
        lines, _ = duplicates.find_repeated_lines(table, status, _SHARED_BY)
        found, owners = next(table.iterate_lines())
        # `kind="sort"`: for integers, numpy 2.0 may choose a lookup table, whose size overflows with 64-bit hashes.
        num_sharing = len(np.unique(owners[np.isin(found, lines, kind="sort")]))
    for kind, name in ((duplicates.EXACT, "repeat an earlier one"), (duplicates.NEAR, "nearly repeat an earlier one")):
        if count := int((status == kind).sum()):
            yield f"{_share(count, sample)} {name}"
    if num_sharing:
        yield f"{_share(num_sharing, sample)} share {pluralize(len(lines), 'line')} that {_SHARED_BY} or more have"


def _find_personal(sample: list[str]) -> Iterator[str]:
    num_documents, totals = 0, Counter[str]()
    for text in sample:
        counts = Counter[str]()
        mask(text, PII_KINDS, counts)
        num_documents += bool(counts)
        totals += counts
    if num_documents:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in totals.most_common())
        yield f"{_share(num_documents, sample)} have personal data or secrets: {kinds}"

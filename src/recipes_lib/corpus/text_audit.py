"""Audit of a sample of training texts: findings of the cleaning steps."""

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
from recipes_lib.corpus.decontamination import Index
from recipes_lib.corpus.documents import count_bytes
from recipes_lib.corpus.duplicates import (
    EXACT,
    NEAR,
    Hashes,
    HashFolder,
    HashTable,
    find_duplicates,
    find_repeated_lines,
)
from recipes_lib.corpus.pii import mask
from recipes_lib.corpus.text_steps import Language
from recipes_lib.errors import ConfigError

MAX_DOCUMENTS: Final = 2000
MAX_BYTES: Final = 1 << 22
_SHARED_BY: Final = 10
_MIN_WORDS_FOR_LANGUAGE: Final = 8
_MIN_LANGUAGE_SHARE: Final = 0.02
# Patterns of UTF-8 decoded as Latin-1, replacement characters, and control characters.
_GARBLED: Final = re.compile("Ã[\x80-\xbf]|â€|\ufffd|[\x00-\x08\x0e-\x1f]")


@dataclass(frozen=True)
class Audit:
    """Findings in a sample.

    Attributes:
        facts: What is there, without judgement.
        warnings: What cleaning would change.
    """

    facts: list[str]
    warnings: list[str]


def audit_texts(texts: Iterable[str], protected: Index | None = None) -> Audit:
    """Check the first ``MAX_DOCUMENTS`` texts, or ``MAX_BYTES`` of them; empty ones are unreadable documents.

    Args:
        texts: A source's, in an order in which the first stand for all.
        protected: Benchmark items that should not occur.
    """
    taken = list(_take(texts))
    sample = [text for text in taken if text.strip()]
    warnings = []
    if empty := len(taken) - len(sample):
        warnings.append(f"{_share(empty, taken)} are empty or cannot be read")
    if not sample:
        return Audit([], warnings)
    facts = [f"sample: {len(sample):,} documents, {sum(map(count_bytes, sample)) / 1e6:.1f} MB"]
    warnings += [*_find_repeated(sample), *_find_personal(sample)]
    if garbled := sum(_GARBLED.search(text) is not None for text in sample):
        warnings.append(f"{_share(garbled, sample)} have garbled characters")
    warnings += _find_languages(sample, facts)
    if protected is not None:
        hits = Counter(task for text in sample for task in {task for task, _, _ in protected.find(text)})
        warnings += [f"{_share(count, sample)} share words with {task}" for task, count in sorted(hits.items())]
    return Audit(facts, warnings)


def _find_languages(sample: list[str], facts: list[str]) -> Iterator[str]:
    """Add the languages to the facts; several languages, or single documents in others, are warnings."""
    languages = count_languages(sample)
    shares = [(name, count / languages.total()) for name, count in languages.most_common()]
    told = [f"{name} {share:.0%}" for name, share in shares[:5]]
    if shares:
        facts.append(f"languages: {', '.join(told)}")
    if sum(share >= _MIN_LANGUAGE_SHARE for _, share in shares) > 1:
        yield f"languages are mixed: {', '.join(told)}; `languages` of recipes clean names those to keep"
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
        # A text of few words is of an uncertain language; `maxsplit` stops at the number that matters.
        if len(text.split(maxsplit=_MIN_WORDS_FOR_LANGUAGE)) > _MIN_WORDS_FOR_LANGUAGE:
            document = Document(text=text, id="")
            try:
                step.apply(document, Counter())
            except ConfigError:  # Without a model, languages are not reported.
                return Counter()
            if document.metadata["language_score"] >= 0.65:
                languages[document.metadata["language"]] += 1
    return languages


def _find_repeated(sample: list[str]) -> Iterator[str]:
    """Duplicates, and lines of many documents."""
    # By files, as of a corpus: the same code finds what cleaning would find.
    config = CorpusConfig(repeated_lines="annotate")
    with tempfile.TemporaryDirectory() as folder:
        hashes = Hashes(config)
        for text in sample:
            hashes.add(text)
        hashes.write(Path(folder), 0)
        table = HashTable([HashFolder(Path(folder), 1, "")])
        status = find_duplicates(table, config).status
        lines, _ = find_repeated_lines(table, status, _SHARED_BY)
        found, owners = next(table.iterate_lines())
        # By its default method numpy 2.0 looks up 64-bit hashes in a table, and overflows.
        num_sharing = len(np.unique(owners[np.isin(found, lines, kind="sort")]))
    for kind, name in ((EXACT, "repeat an earlier one"), (NEAR, "nearly repeat an earlier one")):
        if count := int((status == kind).sum()):
            yield f"{_share(count, sample)} {name}"
    if num_sharing:
        yield f"{_share(num_sharing, sample)} share {len(lines):,} lines that {_SHARED_BY} or more have"


def _find_personal(sample: list[str]) -> Iterator[str]:
    documents, found = 0, Counter[str]()
    for text in sample:
        here = Counter[str]()
        mask(text, PII_KINDS, here)
        documents += bool(here)
        found += here
    if documents:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in found.most_common())
        yield f"{_share(documents, sample)} have personal data or secrets: {kinds}"

"""Benchmark decontamination: documents that share an n-gram with an item of a benchmark or held-out set.

Case and punctuation are ignored, but not numbers: 48 + 24 is another problem than 1 + 2.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from datatrove.data import Document

from recipes_lib.config.corpus_keys import label_entry
from recipes_lib.corpus.duplicates import UNSPACED, HashArray, hash_ngrams, hash_words
from recipes_lib.data.sources.canonical import open_entry
from recipes_lib.data.sources.rows import RawRow, Source
from recipes_lib.errors import DataError, Problem

MIN_ITEM_WORDS: Final = 5
"""Words of the shortest item that is protected: shorter ones, such as "Paris", occur in unrelated documents."""
_CHARACTERS_PER_WORD: Final = 2
"""In scripts without spaces, where ``hash_words`` takes each character for a word."""
_EXCISED_CHARACTERS: Final = 200
"""Characters removed on both sides of an n-gram, as for GPT-3 (Brown et al. 2020, appendix C)."""


class Index:
    """Hashed n-grams of benchmark items.

    Attributes:
        num_items: Benchmark -> number of protected texts.
        num_short: Benchmark -> number of texts that are too short to search for.
    """

    def __init__(self, size: int) -> None:
        """Index n-grams of ``size`` words; a shorter item is indexed as one n-gram of all its words.

        Of an item in a script without spaces, ``_CHARACTERS_PER_WORD`` characters count as a word.
        """
        self.size = size
        self.num_items: Counter[str] = Counter()
        self.num_short: Counter[str] = Counter()
        self._collected: dict[int, list[tuple[HashArray, str]]] = defaultdict(list)

    def add(self, task: str, text: str) -> None:
        """Add an item of the benchmark ``task``."""
        words = hash_words(unicodedata.normalize("NFC", text)).hashes
        factor = _CHARACTERS_PER_WORD if 2 * len(UNSPACED.findall(text)) > len(words) else 1
        if len(words) < factor * MIN_ITEM_WORDS:
            self.num_short[task] += 1
            return
        self.num_items[task] += 1
        size = min(factor * self.size, len(words))
        self._collected[size].append((hash_ngrams(words, size), task))

    @functools.cached_property
    def _tables(self) -> Mapping[int, tuple[HashArray, npt.NDArray[np.uint16]]]:
        """Length of an n-gram in words -> sorted unique hashes ``uint64 (n,)``, and the benchmark of each.

        A benchmark is its place in ``num_items``, ``uint16 (n,)``: a held-out set can have 100 million n-grams.
        """
        numbers, tables = {task: number for number, task in enumerate(self.num_items)}, {}
        for size, collected in self._collected.items():
            unique, first = np.unique(np.concatenate([hashes for hashes, _ in collected]), return_index=True)
            tasks = np.array([numbers[task] for _, task in collected], np.uint16)
            tables[size] = unique, np.repeat(tasks, [len(hashes) for hashes, _ in collected])[first]
        return tables

    def find(self, text: str) -> list[tuple[str, int, int]]:
        """Return the n-grams of a text, in NFC, that occur in an item: benchmark, start and end (exclusive)."""
        words, names = hash_words(text), list(self.num_items)
        found = []
        for size, (hashes, tasks) in self._tables.items():
            ngrams = hash_ngrams(words.hashes, size)
            # `searchsorted` returns the length for an n-gram above all hashes.
            places = np.minimum(np.searchsorted(hashes, ngrams), len(hashes) - 1)
            for at in np.flatnonzero(hashes[places] == ngrams):
                found.append((names[tasks[places[at]]], int(words.starts[at]), int(words.ends[at + size - 1])))
        return found


class Decontamination:
    """Removes documents that share n-grams with benchmarks, or excises these n-grams."""

    name = "decontamination"

    def __init__(self, benchmarks: Sequence[Mapping[str, Any]], size: int, *, excises: bool) -> None:
        """Store the arguments.

        Args:
            benchmarks: Entries of ``benchmarks`` of a corpus.
            size: Words of an n-gram.
            excises: Remove the n-grams and 200 characters on both sides instead of the whole document.
        """
        self._benchmarks, self._size, self._excises = benchmarks, size, excises

    @functools.cached_property
    def index(self) -> Index:
        """N-grams of the items.

        Raises:
            DataError: A benchmark cannot be read, or has no text.
        """
        # Built once per process, at the first document: the pickled step does not contain it.
        index = Index(self._size)
        for benchmark in self._benchmarks:
            for text in read_items(benchmark):
                index.add(label_entry(benchmark), text)
        return index

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the index: a worker process reads the benchmarks itself, which is faster than unpickling it."""
        return {name: value for name, value in self.__dict__.items() if name != "index"}

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Remove a document with an n-gram of an item, or the text around it; list the benchmarks in its metadata."""
        hits = self.index.find(text := unicodedata.normalize("NFC", document.text))
        tasks = sorted({task for task, _, _ in hits})
        found.update(tasks)
        if not hits:
            return None
        document.metadata["contaminated_by"] = tasks
        if not self._excises:
            return tasks[0]
        # Removed ranges overlap, and an n-gram can lie inside the range of an earlier, longer one: `position` is the
        # end of all ranges so far, and only text between it and the start of the next range is kept.
        kept, position = [], 0
        for start, end in sorted((start, end) for _, start, end in hits):
            if start - _EXCISED_CHARACTERS > position:
                kept.append(text[position : start - _EXCISED_CHARACTERS])
            position = max(position, end + _EXCISED_CHARACTERS)
        document.text = "\n".join([*kept, text[position:]]).strip("\n")
        return None


def open_benchmark(benchmark: Mapping[str, Any]) -> Source:
    """Open the items of a benchmark.

    Raises:
        DataError: It cannot be found.
    """
    # `columns` of a benchmark lists columns to protect; that of a source, which `open_entry` expects, renames them.
    return open_entry({**benchmark, "columns": None})


def read_items(benchmark: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a benchmark's items: each column, and all columns of a row as one text.

    The latter finds a question and its answer that a document has one after the other.

    Raises:
        DataError: The benchmark cannot be read, lacks a configured column, or has no text.
    """
    name, source = benchmark["name"], open_benchmark(benchmark)
    is_empty = True
    for entry in source.rows():
        if not isinstance(entry, RawRow):
            raise DataError(entry)
        columns = benchmark.get("columns") or list(entry.columns)
        if missing := [column for column in columns if column not in entry.columns]:
            found = f"there is no column `{missing[0]}`"
            raise DataError(Problem(entry.where, found, f"name some of {', '.join(entry.columns)} in `columns`"))
        texts = [" ".join(_list_texts(entry.columns[column])) for column in columns]
        texts = [text for text in texts if text.strip()]
        is_empty = is_empty and not texts
        yield from texts
        if len(texts) > 1:
            yield " ".join(texts)
    if is_empty:
        raise DataError(Problem(name, "the benchmark has no text", "name its `split` and `columns`"))


def _list_texts(value: Any) -> Iterator[str]:
    """Yield the strings of a nested value: choices are lists, messages are mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _list_texts(inner)

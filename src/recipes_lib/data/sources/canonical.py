"""Opening of a dataset by its name (file, folder or Hub id), and its rows in canonical form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.paths import HUB_ID, expand_home, suggest_sibling
from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.sources.formats import COLUMNS, RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.hub_datasets import is_saved, load_hub, load_saved
from recipes_lib.data.sources.local_files import READERS, choose_config, find_suffix, load_files, read_card
from recipes_lib.data.sources.messages import REASONING
from recipes_lib.data.sources.readers import TextDocuments
from recipes_lib.data.sources.rows import Entry, RawRow, Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems, raise_problems, suggest

_OF_SOURCE: Final = ("name", "config", "revision", "split", "columns", "streaming", "text_documents")
"""Keys of a mixture's entry that select its rows: the arguments of ``load_source``."""
_MAX_WITHOUT_LAYOUT: Final = 20
"""Leading rows that are searched for one with a known layout."""
_MAX_WITHOUT_COLUMN: Final = 1000
"""Leading rows of which one must have a column of the dataset that ``columns`` names."""
_ANSWERS: Final = re.compile(r"((answer|response|completion|output|solution|target)s?|code)(_\w)?", re.I)
"""Columns beside ``text`` that may answer it, as ``code`` in MBPP and ``completion_a`` in MultiPref."""


@dataclass(frozen=True, slots=True)
class RenamedSource:
    """A source with renamed or hidden columns.

    Attributes:
        source: The underlying source.
        columns: New name -> column of the source or a field of one (``a.b``); ``None`` hides the column of that name.
    """

    source: Source
    columns: Mapping[str, str | None]

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def streaming(self) -> bool:
        """Whether the source is streamed."""
        return self.source.streaming

    def fingerprint(self) -> str:
        """Return the SHA-256 of the source's fingerprint and of ``columns``."""
        return hashlib.sha256(json.dumps([self.source.fingerprint(), dict(self.columns)]).encode()).hexdigest()

    def rows(self) -> Iterator[Entry]:
        """Yield the rows from the start, with renamed columns.

        Raises:
            DataError: As the source.
        """
        for entry in self.source.rows():
            yield replace(entry, columns=self._rename(entry.columns)) if isinstance(entry, RawRow) else entry

    def _rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        kept = row
        for column in (*self.columns, *filter(None, self.columns.values())):
            kept = _hide(kept, column)
        return dict(kept) | {name: _find(row, column) for name, column in self.columns.items() if column}


def _hide(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return a row without a column, or without a field of its object; one that is a text of JSON is left out whole."""
    first, _, field = column.partition(".")
    if column not in row and isinstance(row.get(first), Mapping):
        return {**row, first: _hide(row[first], field)}
    return {name: value for name, value in row.items() if name != (column if column in row else first)}


def _find(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field of its object (``reward_model.ground_truth``); ``None`` without.

    The object may be a text of JSON, as ``metadata`` often is, since objects of different fields have no Arrow type.
    """
    value: Any = row
    for key in [column] if column in row else column.split("."):
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def load_source(
    name: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    split: str = "train",
    columns: Mapping[str, str | None] | None = None,
    streaming: bool = False,
    text_documents: TextDocuments = "line",
) -> Source:
    """Open a dataset by name: an existing file or folder, otherwise a Hub dataset.

    Args:
        name: Path or Hub id.
        config: Configuration of a Hub dataset, or of a folder with a dataset card.
        revision: Commit, tag or branch of a Hub dataset.
        split: Split to read.
        columns: Column of a layout -> column of the dataset (``dataset_columns``); ``None`` hides a column.
        streaming: Whether to stream a Hub dataset instead of downloading it; local files are always read lazily.
        text_documents: Unit of a row in text and Markdown files.

    Raises:
        ConfigError: ``columns`` has a key that no layout has, or a value that is not a column name.
        DataError: The file, folder, Hub dataset or split does not exist, or has an unknown file type; or none of the
            leading rows has a column that ``columns`` names.
    """
    if columns is not None:
        _check_columns(columns)
        source = load_source(
            name, config=config, revision=revision, split=split, streaming=streaming, text_documents=text_documents
        )
        _refuse_missing(source, columns)
        return RenamedSource(source, columns)
    path = Path(expand_home(name))
    try:
        is_folder, is_local = path.is_dir(), bool(name) and path.exists()
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise DataError(Problem(name, found, "check the path and its permissions")) from None
    if not is_local:
        _refuse_missing_path(path, name)
        return load_hub(name, config, revision, split, streaming)
    card = read_card(path) if is_folder else {}
    if revision or (config and not card):
        found = "a configuration or revision is for Hub datasets; this is a local path"
        raise DataError(Problem(name, found, "remove them, or rename the local path if the Hub dataset is meant"))
    if is_folder and is_saved(path):
        return load_saved(path, name, split)
    return load_files(path, name, split, text_documents, choose_config(card, config, name) if card else None)


def open_entry(entry: Mapping[str, Any], **defaults: Any) -> Source:
    """Open an entry of a mixture or corpus with ``load_source``; other keys of the entry are ignored.

    Args:
        entry: Keys of ``load_source`` by name, and possibly others, such as ``weight``.
        defaults: Arguments of ``load_source`` for keys that the entry lacks.

    Raises:
        ConfigError: As ``load_source``.
        DataError: As ``load_source``.
    """
    return load_source(**{key: value for key, value in {**defaults, **entry}.items() if key in _OF_SOURCE})


def _check_columns(columns: Mapping[str, Any]) -> None:
    problems = []
    for name, column in columns.items():
        if name not in COLUMNS and not REASONING.fullmatch(name):
            remedy = suggest(name, COLUMNS, f"name one of {', '.join(sorted(COLUMNS))}")
            problems.append(Problem("dataset_columns", f"no layout has a column `{name}`", remedy))
        if column is not None and not isinstance(column, str):
            problems.append(Problem("dataset_columns", f"`{name}: {column}` names no column", "quote it"))
    if problems:
        raise ConfigError(*problems)


def _refuse_missing(source: Source, columns: Mapping[str, str | None]) -> None:
    """Raise if none of the leading rows has a column; in some of them, it can be missing or null.

    Raises:
        DataError: A column is missing.
    """
    missing = {name: column for name, column in columns.items() if column is not None}
    where, known = "", dict[str, None]()
    try:
        for entry in islice(source.rows(), _MAX_WITHOUT_COLUMN) if missing else ():
            if isinstance(entry, RawRow):
                row = entry.columns
                fields = (f"{name}.{at}" for name, value in row.items() if isinstance(value, Mapping) for at in value)
                where, known = where or entry.where, known | dict.fromkeys((*row, *fields))
                missing = {name: key for name, key in missing.items() if key not in row and _find(row, key) is None}
            if not missing:
                return
    except DataError:  # Raised again where the rows are read.
        return
    problems = []
    for name, column in missing.items() if known else ():
        remedy = suggest(column, known, f"name one of {', '.join(known)}")
        problems.append(Problem(where, f"dataset_columns.{name}: there is no column `{column}`", remedy))
    raise_problems(problems, source.name)


def detect_source_format(source: Source, declared_format: DatasetFormat = "auto") -> RowFormat:
    """Return the layout of a source's rows: that of the first row with a known layout.

    Raises:
        DataError: The source has no rows, or none of the leading ones has a known layout (the first row's problem).
    """
    problems: list[Problem] = []
    for entry in islice(source.rows(), _MAX_WITHOUT_LAYOUT):
        with collect_problems(problems):
            if isinstance(entry, RawRow):
                return _detect_strictly(entry, declared_format)
            raise DataError(entry)
    raise DataError((problems or [_no_rows(source.name)])[0])


def read_entries(
    entries: Iterable[Entry], name: str, declared_format: DatasetFormat, *, as_documents: bool = False
) -> Iterator[Row | Problem]:
    """Yield each row in canonical form, or a ``Problem``; the first row with a known layout determines that of all.

    Args:
        entries: Rows and problems of a source.
        name: Name of the source in errors.
        declared_format: Value of ``dataset_format``.
        as_documents: A text is whole: what is beside it is not its answer.

    Raises:
        DataError: The source has no rows, none of the leading ones has a known layout, or it cannot be read further;
            raised after the last row.
    """
    row_format: RowFormat | None = None
    without_layout: list[Problem] = []
    is_empty = True
    for entry in entries:
        is_empty = False
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            if row_format is None:
                row_format = (detect_format if as_documents else _detect_strictly)(entry, declared_format)
                yield from without_layout
            yield canonicalize(entry, row_format)
        except DataError as error:
            if row_format is not None:
                yield error.problems[0]
            # Held back until the layout is known. Then these rows are broken ones among others; if no row has a layout,
            # all fail for the same reason, and only the first is raised.
            elif len(without_layout) < _MAX_WITHOUT_LAYOUT:
                without_layout += error.problems
            else:
                break
    if is_empty:
        raise DataError(_no_rows(name))
    if row_format is None and without_layout:
        raise DataError(without_layout[0])


def _detect_strictly(entry: RawRow, declared: DatasetFormat) -> RowFormat:
    """As ``detect_format``, but refuse a text beside an answer: as its question, it would be trained on alone.

    Raises:
        DataError: The text may be a question; or as ``detect_format``.
    """
    row_format = detect_format(entry, declared)
    if row_format.name == "text" and declared == "auto":
        raw = entry.columns
        for column in filter(_ANSWERS.fullmatch, row_format.ignored):
            text, answer = row_format.columns[0], raw[column] if isinstance(raw[column], str) else ""
            # A `code` of one word may be a language.
            if len(answer.split()) > (column == "code") and answer.strip() not in str(raw[text]):
                found = f"`{text}` may be the question of `{column}`, and would be trained on alone"
                named = f"`dataset_columns: {{question: {text}, answer: {column}}}`"
                remedy = f"write {named}; convert judged answers to pairs; or set `dataset_format: text`"
                raise DataError(Problem(entry.where, found, remedy))
    return row_format


def _no_rows(name: str) -> Problem:
    return Problem(name, "no rows: it is empty, has only blank lines, or is an empty list", "check how it was written")


def _refuse_missing_path(path: Path, name: str) -> None:
    """Raise if a name can only be a path, and so is not looked up on the Hub."""
    if HUB_ID.fullmatch(name) and find_suffix(path) not in READERS:
        return
    # Not of the path, which has no `://` any more.
    remedy = suggest_sibling(expand_home(name)) or f"paths start from {Path.cwd()}"
    raise DataError(Problem(name or "dataset_name", "no such file or folder", remedy))

"""``dataset_name`` to rows in canonical form, from files, folders or the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import DatasetFormat, TokensConfig
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.formats import COLUMNS, RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.hub_datasets import is_saved, load_hub, load_saved
from recipes_lib.data.sources.local_files import READERS, find_suffix, load_files
from recipes_lib.data.sources.readers import TextDocuments
from recipes_lib.data.sources.rows import Entry, RawRow, Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, suggest

_OF_SOURCE: Final = ("name", "config", "revision", "split", "columns", "streaming", "text_documents")
"""Keys of an entry that say which rows are read; the others are of who reads them."""
_MAX_WITHOUT_LAYOUT: Final = 20
"""Rows looked at in search of one that has a layout."""


@dataclass(frozen=True, slots=True)
class RenamedSource:
    """A source with renamed or hidden columns.

    Attributes:
        source: The source.
        columns: Column of it by the name that it gets; ``None``: left out.
    """

    source: Source
    columns: Mapping[str, str | None]

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def streaming(self) -> bool:
        """As for the source."""
        return self.source.streaming

    def fingerprint(self) -> str:
        """SHA-256 of the source's fingerprint and of the names."""
        return hashlib.sha256(json.dumps([self.source.fingerprint(), dict(self.columns)]).encode()).hexdigest()

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: The first row has not all of the columns.
        """
        is_first = True
        for entry in self.source.rows():
            if isinstance(entry, RawRow):
                if is_first:
                    self._refuse_missing(entry)
                is_first = False
                entry = replace(entry, columns=self._rename(entry.columns))
            yield entry

    def _rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        hidden = {*self.columns, *self.columns.values()}
        kept = {name: value for name, value in row.items() if name not in hidden}
        return kept | {
            name: row[column] for name, column in self.columns.items() if column is not None and column in row
        }

    def _refuse_missing(self, row: RawRow) -> None:
        problems = []
        for name, column in self.columns.items():
            if column is not None and column not in row.columns:
                remedy = suggest(column, row.columns, f"name one of {', '.join(row.columns)}")
                problems.append(Problem(row.where, f"dataset_columns.{name}: there is no column `{column}`", remedy))
        if problems:
            raise DataError(*problems)


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
    """Open a dataset by the user's name: the path of a file or folder if it exists, else a Hub id.

    Args:
        name: Path or Hub id.
        config: Configuration of a Hub dataset.
        revision: Commit, tag or branch of a Hub dataset.
        split: Split wanted.
        columns: Column of the dataset for each column of a layout (``dataset_columns``); ``None`` leaves one out.
        streaming: Read a Hub dataset without downloading it first; local data are never held in memory.
        text_documents: What a row of a text or Markdown file is.

    Raises:
        ConfigError: ``columns`` names what no layout has, or no column.
        DataError: There is no such file, folder, Hub dataset or split, or it is of an unknown kind.
    """
    if columns is not None:
        _check_columns(columns)
        source = load_source(
            name, config=config, revision=revision, split=split, streaming=streaming, text_documents=text_documents
        )
        return RenamedSource(source, columns)
    path = Path(expand_home(name))
    try:
        is_folder, is_local = path.is_dir(), bool(name) and path.exists()
    except OSError as error:
        raise DataError(
            Problem(name, f"cannot be read: {error.strerror}", "check the path and its permissions")
        ) from None
    if not is_local:
        _refuse_missing_path(path, name)
        return load_hub(name, config, revision, split, streaming)
    if config or revision:
        found = "`dataset_config` and `dataset_revision` are for Hub datasets; this is a local path"
        raise DataError(Problem(name, found, "remove them, or rename the local path if the Hub dataset is meant"))
    if is_folder and is_saved(path):
        return load_saved(path, name, split)
    return load_files(path, name, split, text_documents)


def open_entry(entry: Mapping[str, Any], **defaults: Any) -> Source:
    """Open an entry of a mixture or corpus by its keys of ``load_source``; ``defaults`` are those that it lacks.

    Raises:
        ConfigError: As ``load_source``.
        DataError: As ``load_source``.
    """
    return load_source(**{key: value for key, value in {**defaults, **entry}.items() if key in _OF_SOURCE})


def _check_columns(columns: Mapping[str, Any]) -> None:
    problems = []
    for name, column in columns.items():
        if name not in COLUMNS:
            remedy = suggest(name, COLUMNS, f"name one of {', '.join(sorted(COLUMNS))}")
            problems.append(Problem("dataset_columns", f"no layout has a column `{name}`", remedy))
        if column is not None and not isinstance(column, str):
            problems.append(Problem("dataset_columns", f"`{name}: {column}` names no column", "quote it"))
    if problems:
        raise ConfigError(*problems)


def read_rows(
    source: Source, declared_format: DatasetFormat = "auto", tokens: TokensConfig | None = None
) -> Iterator[Row]:
    """Read the rows of a source in canonical form; the first row with a layout determines that of all.

    Raises:
        DataError: Once, after the whole source is read: every problem, or that there is no row.
    """
    return BrokenRows(tokens, is_stream=source.streaming).read(read_entries(source, declared_format), source.name)


def detect_source_format(source: Source, declared_format: DatasetFormat = "auto") -> RowFormat:
    """Return the layout of a source's rows, from the first row that has one.

    Raises:
        DataError: There is none: what is wrong with the first row, or that there is no row.
    """
    first: Problem | None = None
    for entry in islice(source.rows(), _MAX_WITHOUT_LAYOUT):
        try:
            if isinstance(entry, RawRow):
                return detect_format(entry.columns, declared_format, where=entry.where)
            raise DataError(entry)
        except DataError as error:
            first = first or error.problems[0]
    raise DataError(first or _no_rows(source))


def read_entries(source: Source, declared_format: DatasetFormat) -> Iterator[Row | Problem]:
    """Yield each row in canonical form, or the problem in its place.

    Raises:
        DataError: At the end: no row has a layout, there is no row, or the source cannot be read further.
    """
    row_format: RowFormat | None = None
    without_layout: list[Problem] = []
    is_empty = True
    for entry in source.rows():
        is_empty = False
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            if row_format is None:
                row_format = detect_format(entry.columns, declared_format, where=entry.where)
                yield from without_layout
            yield canonicalize(entry.columns, row_format, entry.source, entry.index, entry.index_name)
        except DataError as error:
            if row_format is not None:
                yield error.problems[0]
            # Kept until a row has a layout: then these are broken ones; if none has, the first is told alone.
            elif len(without_layout) < _MAX_WITHOUT_LAYOUT:
                without_layout += error.problems
            else:
                break
    if is_empty:
        raise DataError(_no_rows(source))
    if row_format is None and without_layout:
        raise DataError(without_layout[0])


def _no_rows(source: Source) -> Problem:
    return Problem(
        source.name, "no rows: it is empty, has only blank lines, or is an empty list", "check how it was written"
    )


def _refuse_missing_path(path: Path, name: str) -> None:
    """Raise if a name that does not exist can only be a path."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1 or find_suffix(path) in READERS
    if name.strip() and not is_path:
        return
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    remedy = suggest(path.name, siblings, f"paths start from {Path.cwd()}", f"`{path.parent / '{}'}`")
    raise DataError(Problem(name or "dataset_name", "no such file or folder", remedy))

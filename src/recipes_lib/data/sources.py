"""What ``dataset_name`` names, and its rows in canonical form."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import DatasetFormat, TokensConfig
from recipes_lib.data.broken_rows import BrokenRows
from recipes_lib.data.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.rows import Row
from recipes_lib.data.source_files import READERS, load_files
from recipes_lib.data.source_hub import is_saved, load_hub, load_saved
from recipes_lib.data.source_rows import RawRow, Source
from recipes_lib.data.source_text import TextDocuments
from recipes_lib.errors import DataError, Problem

_MAX_WITHOUT_LAYOUT: Final = 20
"""Rows looked at in search of one that has a layout."""


def load_source(
    name: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    split: str = "train",
    streaming: bool = False,
    text_documents: TextDocuments = "line",
) -> Source:
    """Open a dataset by the name the user gave: the path of a file or folder if there is one, else a Hub id.

    Args:
        name: Path or Hub id.
        config: Configuration of a Hub dataset.
        revision: Commit, tag or branch of a Hub dataset.
        split: Split wanted.
        streaming: Read a Hub dataset without downloading it first; local data are never held in memory.
        text_documents: What a row of a text or Markdown file is.

    Raises:
        DataError: There is no such file, folder, Hub dataset or split, or it is of an unknown kind.
    """
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


def read_rows(
    source: Source, declared_format: DatasetFormat = "auto", tokens: TokensConfig | None = None
) -> Iterator[Row]:
    """Read the rows of a source in canonical form; the first row that has a layout says which all of them have.

    Raises:
        DataError: Once, after the whole source is read: every problem, or that there is no row.
    """
    return BrokenRows(tokens, is_stream=source.streaming).read(read_entries(source, declared_format), source.name)


def detect_source_format(source: Source, declared_format: DatasetFormat = "auto") -> RowFormat:
    """Name the layout of a source's rows, from the first that has one.

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
    """Yield each row in canonical form, or the problem that stands in its place.

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
            elif len(without_layout) < _MAX_WITHOUT_LAYOUT:
                without_layout += error.problems
            else:
                break
    if is_empty:
        raise DataError(_no_rows(source))
    if row_format is None and without_layout:
        raise DataError(without_layout[0])


def _no_rows(source: Source) -> Problem:
    return Problem(source.name, "no rows: it is empty or has only blank lines", "check how it was written")


def _refuse_missing_path(path: Path, name: str) -> None:
    """Raise when a name that leads nowhere can only have been meant as a path."""
    inner = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1 or inner.suffix in READERS
    if name.strip() and not is_path:
        return
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    remedy = f"did you mean `{path.parent / nearest[0]}`?" if nearest else f"paths start from {Path.cwd()}"
    raise DataError(Problem(name or "dataset_name", "no such file or folder", remedy))

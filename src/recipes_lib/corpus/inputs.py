"""Sources as tasks of bounded size, and their documents: ranges of local files, HTML, WARC, Hub datasets."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib.config.corpus_keys import CorpusConfig, label_entry
from recipes_lib.corpus.documents import (
    CHAT,
    HTML,
    PART_END,
    Ledger,
    StepTally,
    count_bytes,
    split_chat,
)
from recipes_lib.corpus.web_archive import MAX_PAGE_BYTES, read_warc
from recipes_lib.data.sources.canonical import RenamedSource, open_entry
from recipes_lib.data.sources.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.hub_datasets import HubSource
from recipes_lib.data.sources.local_files import (
    IGNORED_NAMES,
    READERS,
    FileSource,
    compute_digest,
    find_codec,
    find_suffix,
)
from recipes_lib.data.sources.messages import TRAIN
from recipes_lib.data.sources.readers import read_parquet
from recipes_lib.data.sources.rows import Entry, RawRow, Row, Source
from recipes_lib.errors import DataError, Problem

READ: Final = "read"
"""Name of the first step."""
_HTML: Final = (".html", ".htm", ".xhtml")
_WARC: Final = (".warc", ".wet", ".warc.gz", ".wet.gz")
_LINES: Final = (".jsonl", ".ndjson")
_PARQUET: Final = ".parquet"
MAX_DOCUMENT_BYTES: Final = 1 << 27
"""Longer documents are removed: the steps take up to twenty bytes of memory for a byte of text."""
_PLACES: Final = 20
"""Places of a source that are read in turn for a sample."""


@dataclass(frozen=True)
class Part:
    """A piece of a source: a file, a range of a file's lines, or a share of a dataset; a page or rows.

    Attributes:
        label: As errors and ids call it.
        page: HTML or WARC file.
        source: Rows.
        num_bytes: Of its file; ``None``: not known.
    """

    label: str
    page: Path | None = None
    source: Source | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class FileRange:
    """Rows in a range of a large file: bytes of a JSON Lines file, or row groups of Parquet.

    Attributes:
        name: As errors call it.
        path: The file.
        start: First byte, with which a line begins, or row group.
        stop: What follows the last.
    """

    name: str
    path: Path
    start: int
    stop: int
    streaming = False

    def rows(self) -> Iterator[Entry]:
        """Read from the start."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            if self.path.suffix == _PARQUET:
                yield from read_parquet(file, self.name, range(self.start, self.stop))
                return
            lines = file.get_stream(self.start, self.stop - self.start)
            yield from READERS[".jsonl"](io.BufferedReader(lines, 1 << 20), self.name)

    def fingerprint(self) -> str:
        """SHA-256 of the file, and of the range."""
        told = f"{compute_digest(self.path).hex()} {self.start} {self.stop}"
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True)
class CorpusInput:
    """A source of the corpus.

    Attributes:
        label: Value of ``source`` in its documents.
        kind: Chooses the quality preset.
        entry: As the user wrote it.
        tasks: Its parts, in the order of the documents.
        fingerprint: SHA-256 of its content.
    """

    label: str
    kind: str
    entry: Mapping[str, Any]
    tasks: tuple[tuple[Part, ...], ...]
    fingerprint: str


def open_inputs(config: CorpusConfig, *, streams: bool = False) -> list[CorpusInput]:
    """Find the files and datasets of all sources.

    Args:
        config: The corpus.
        streams: Download no dataset of the Hub: who looks at its size and first row needs none of it.

    Raises:
        DataError: One cannot be found or read.
    """
    streamed = {"streaming": True} if streams else {}
    return [_open({**entry, **streamed}, config.task_megabytes << 20) for entry in config.sources]


def count_input_bytes(source: CorpusInput) -> int | None:
    """Return the bytes of a source's files, or the size of a Hub dataset; ``None`` if unknown."""
    sizes = [part.num_bytes for task in source.tasks for part in task]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _open(entry: Mapping[str, Any], task_bytes: int) -> CorpusInput:
    label, kind = label_entry(entry), entry.get("kind", "text")
    path = Path(entry["name"])
    pages = _find_pages(path)
    if pages:
        names = [str(page.relative_to(path)) if path.is_dir() else page.name for page in pages]
        parts = [
            Part(f"{label}/{name}", page, num_bytes=page.stat().st_size)
            for name, page in zip(names, pages, strict=True)
        ]
        digests = b"".join(name.encode() + compute_digest(page) for name, page in zip(names, pages, strict=True))
        fingerprint = hashlib.sha256(digests).hexdigest()
    else:
        source = open_entry(entry, text_documents="file")
        parts, fingerprint = list(split_source(source, label, task_bytes)), source.fingerprint()
    return CorpusInput(label, kind, entry, tuple(_group(parts, task_bytes)), fingerprint)


def _find_pages(path: Path) -> list[Path]:
    """HTML and WARC files, which row readers do not support; in a folder all below it, sorted.

    Raises:
        DataError: Other data files lie beside them.
    """
    # As of other kinds of files, those in hidden folders are no data.
    below = (file for file in path.rglob("*") if "/." not in f"/{file.relative_to(path).as_posix()}")
    files = [path] if path.is_file() else sorted(file for file in below if file.is_file())
    pages = [file for file in files if file.name.lower().endswith((*_HTML, *_WARC))]
    others = [file for file in files if find_suffix(file) in READERS and file.name not in IGNORED_NAMES]
    if pages and others:
        found = f"the folder mixes pages and other data: {pages[0].name}, {others[0].name}"
        raise DataError(Problem(str(path), found, "put them into two folders, and name both as sources"))
    return pages


def split_source(source: Source, label: str, task_bytes: int) -> Iterator[Part]:
    """Yield the parts of a source: ranges of large JSON Lines and Parquet files, other files, dataset shards."""
    if isinstance(source, RenamedSource):
        for part in split_source(source.source, label, task_bytes):
            yield replace(part, source=replace(source, source=part.source or source.source))
    elif isinstance(source, HubSource):
        dataset = source.dataset
        whole = source.num_bytes or (None if source.streaming else dataset.dataset_size)
        num = dataset.num_shards if source.streaming else max(1, (whole or 0) // task_bytes)
        size = None if whole is None else whole // num
        for index in range(num):
            shard = dataset.shard(num_shards=num, index=index) if num > 1 else dataset
            yield Part(f"{label}/{index}", source=replace(source, dataset=shard), num_bytes=size)
    elif isinstance(source, FileSource):
        for name, path in source.files.items():
            # The path relative to the folder, because files of two folders can have the same name.
            short = f"{label}{name.removeprefix(source.name.rstrip('/'))}"
            size = path.stat().st_size
            # Two borders are one range, which is the file.
            borders = _find_borders(path, size, -(-size // task_bytes))
            if len(borders) < 3:
                yield Part(short, source=replace(source, files={name: path}), num_bytes=size)
                continue
            for start, stop in itertools.pairwise(borders):
                # Lines are counted from the start of a range, Parquet rows from the start of the file.
                place = f"{short}@{start}" if start and path.suffix in _LINES else short
                share = size * (stop - start) // borders[-1]
                yield Part(place, source=FileRange(place, path, start, stop), num_bytes=share)
    else:
        yield Part(label, source=source)


def _find_borders(path: Path, size: int, num: int) -> list[int]:
    """Positions that split a file into ``num`` ranges, fewer if it has fewer row groups; empty if unsplittable."""
    if num < 2:
        return []
    try:
        if find_codec(path) is not None:
            return []
        if path.suffix in _LINES and not _is_array(path):
            return [*(_find_line(path, size * at // num) for at in range(num)), size]
        if path.suffix == _PARQUET:
            import pyarrow.parquet as pq

            num_groups = pq.read_metadata(path).num_row_groups
            return sorted({num_groups * at // num for at in range(num + 1)})
    except (OSError, ValueError, DataError):  # The reader reports the error.
        pass
    return []


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _find_line(path: Path, offset: int) -> int:
    """First byte at or after ``offset`` at which a line begins."""
    if offset == 0:
        return 0
    with path.open("rb") as file:
        # One byte before: if that is a line end, the line begins at the offset itself.
        file.seek(offset - 1)
        file.readline()
        return file.tell()


def _group(parts: Iterable[Part], task_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Group small files into tasks."""
    group: list[Part] = []
    size = 0
    for part in parts:
        # Each shard of a dataset is a task.
        own = task_bytes if part.num_bytes is None or isinstance(part.source, HubSource) else part.num_bytes
        if group and size + own > task_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += own
    if group:
        yield tuple(group)


class Read(PipelineStep):  # type: ignore[misc]
    """Reads the documents of a task and counts unreadable ones."""

    type, name = "READ", READ

    def __init__(self, source: CorpusInput, ledger: Ledger, *, raises: bool) -> None:
        """Read ``source``; ``raises``: the first unreadable record is an error."""
        super().__init__()
        self.source, self.ledger, self.raises = source, ledger, raises

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task ``rank``.

        Raises:
            DataError: Something cannot be read, and that is an error.
        """
        tally = self.ledger.tallies[READ]
        for part in self.source.tasks[rank]:
            for found in self._read(part):
                if isinstance(found, Problem):
                    self._refuse(found, tally)
                    continue
                self._refuse_kind(found)
                found.metadata["source"] = self.source.label
                if self.source.entry.get("html"):
                    found.metadata[HTML] = True
                size = count_bytes(found.text)
                tally.documents_in += 1
                tally.bytes_in += size
                if not found.text.strip():
                    self.ledger.remove(READ, "empty", found)
                    continue
                if size > MAX_DOCUMENT_BYTES:
                    self.ledger.remove(READ, f"longer than {MAX_DOCUMENT_BYTES:,} bytes", found)
                    continue
                tally.documents_out += 1
                tally.bytes_out += size
                yield found

    def _refuse_kind(self, document: Document) -> None:
        """Raise for chats among texts, whose columns would be lost, and for texts among chats."""
        if (CHAT in document.metadata) == (self.source.kind == "chat"):
            return
        found, remedy = "is a text", "leave `kind: chat` out"
        if CHAT in document.metadata:
            found, remedy = f"is a chat or has an answer, and the kind is `{self.source.kind}`", "write `kind: chat`"
        where = f"{self.source.entry['name']}: {document.id}"
        raise DataError(Problem(where, found, f"{remedy}; name files of the other kind as a source of their own"))

    def _refuse(self, problem: Problem, tally: StepTally) -> None:
        if self.raises:
            remedy = problem.remedy or "fix it"
            raise DataError(replace(problem, remedy=f"{remedy}, or write `broken_rows: drop`, which counts it"))
        tally.documents_in += 1
        tally.removed["cannot be read"] += 1
        if len(self.ledger.notes) < self.ledger.max_notes:
            self.ledger.notes.append(f"{problem.where}: {problem.found}")

    def _read(self, part: Part) -> Iterator[Document | Problem]:
        try:
            if part.source is not None:
                yield from read_documents(part.source.rows(), part.label)
            elif part.page is not None and part.page.name.lower().endswith(_WARC):
                yield from read_warc(part.page, part.label)
            elif part.page is not None:
                yield read_page(part.page, part.label)
        except DataError as error:
            yield from error.problems
        except OSError as error:
            yield Problem(part.label, f"cannot be read: {error.strerror or error}")


def read_documents(entries: Iterable[Entry], label: str) -> Iterator[Document | Problem]:
    """Yield each row as a document, or the problem in its place; the first valid row determines the layout."""
    row_format: RowFormat | None = None
    for entry in entries:
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            if row_format is None:
                row_format = detect_format(entry.columns, "auto", where=entry.where)
            row = canonicalize(entry.columns, row_format, entry.source, entry.index, entry.index_name)
            yield _to_document(row, entry, label, row_format)
        except DataError as error:
            yield error.problems[0]


def _to_document(row: Row, entry: RawRow, label: str, row_format: RowFormat) -> Document:
    given = entry.columns.get("id")
    name = f"{label}:{entry.index}" if given is None or isinstance(given, dict | list) else str(given)
    used = {*row_format.columns, "id", "source"}
    metadata = {column: value for column, value in entry.columns.items() if column not in used}
    if row.text is not None:
        return Document(text=row.text, id=name, metadata=metadata)
    columns = json.loads(json.dumps(list_columns(row), default=str))
    text, left = split_chat(columns)
    # A message that contains the separator would be split.
    if PART_END in json.dumps(columns, ensure_ascii=False):
        found = f"holds the character U+{ord(PART_END):04X}, which marks where messages end"
        raise DataError(Problem(row.where, found, "take it out"))
    return Document(text=text, id=name, metadata={**metadata, CHAT: left})


def list_columns(row: Row) -> dict[str, Any]:
    """Return a chat, or a prompt and its answers, as dataset columns that give the same row again."""
    columns: dict[str, Any] = {"prompt": row.prompt, "completion": row.completion}
    if row.messages is not None:
        marked = [{**turn, TRAIN: False} if at in row.untrained else turn for at, turn in enumerate(row.messages)]
        num = row.num_prompt_messages
        columns = {"messages": marked} if num is None else {"prompt": marked[:num], "completion": marked[num:]}
    if row.rejected is not None:
        columns = {"prompt": columns["prompt"], "chosen": columns["completion"], "rejected": row.rejected}
    extras = {"tools": row.tools, "chat_template_kwargs": row.template_kwargs, "margin": row.margin}
    return columns | {name: value for name, value in extras.items() if value not in (None, [], {})}


def read_page(path: Path, label: str) -> Document | Problem:
    """Read an HTML file in any encoding."""
    from trafilatura.utils import decode_file

    with path.open("rb") as file:
        data = file.read(MAX_PAGE_BYTES + 1)
    if len(data) > MAX_PAGE_BYTES:
        return Problem(label, f"more than {MAX_PAGE_BYTES:,} bytes are no web page")
    return Document(text=decode_file(data), id=label, metadata={HTML: True})


@dataclass(frozen=True)
class SpreadSource:
    """Source sampled at several places in parallel, so that its first rows are representative.

    Attributes:
        source: The source.
    """

    source: Source

    @property
    def name(self) -> str:
        """As of the source."""
        return self.source.name

    @property
    def streaming(self) -> bool:
        """As of the source."""
        return self.source.streaming

    def fingerprint(self) -> str:
        """As of the source."""
        return self.source.fingerprint()

    def rows(self) -> Iterator[Entry]:
        """Yield rows and problems from each place in turn; an exhausted place is replaced by another."""
        # Each place of a stream is a file on the network.
        places = 4 if self.streaming else _PLACES
        size = sum(part.num_bytes or 0 for part in split_source(self.source, self.name, sys.maxsize))
        parts = [part.source or self.source for part in split_source(self.source, self.name, -(-size // places) or 1)]
        # Every stride-th part first: the first rows then come from all over the source.
        stride = -(-len(parts) // places)
        waiting = [parts[at].rows() for first in range(stride) for at in range(first, len(parts), stride)]
        while waiting:
            active, waiting = waiting[:places], waiting[places:]
            while active:
                for rows in list(active):
                    try:
                        yield next(rows)
                        continue
                    except StopIteration:
                        pass
                    except DataError as error:
                        yield from error.problems
                    active.remove(rows)
                    active += [waiting.pop(0)] if waiting else []

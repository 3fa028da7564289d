"""Sources of a corpus, split into tasks of bounded size, and the documents of a task.

A part of a task is a range of a local file, an HTML page, a WARC file, or a shard of a Hub dataset.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import Any, Final

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib.config.corpus_keys import CorpusConfig, label_entry
from recipes_lib.corpus.documents import CHAT, HTML, PART_END, SOURCE, Ledger, escape_surrogates, split_chat
from recipes_lib.corpus.web_archive import MAX_PAGE_BYTES, decode_page, read_warc
from recipes_lib.data.sources import local_files
from recipes_lib.data.sources.canonical import RenamedSource, open_entry
from recipes_lib.data.sources.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.hub_datasets import HubSource
from recipes_lib.data.sources.messages import TRAIN
from recipes_lib.data.sources.readers import enumerate_lines, read_json_lines, read_parquet
from recipes_lib.data.sources.rows import Entry, RawRow, Row, Source
from recipes_lib.errors import DataError, Problem, ReadFailedError
from recipes_lib.files import count_bytes

READ: Final = "read"
"""Name of the first step, in counts and reports."""
ANY: Final = "any"
"""Kind of a source with texts and chats, whose columns are not needed; not a value of the configuration."""
_HTML: Final = (".html", ".htm", ".xhtml")
_WARC: Final = (".warc", ".wet", ".warc.gz", ".wet.gz")
_LINES: Final = (".jsonl", ".ndjson")
_PARQUET: Final = ".parquet"
_UNENCODABLE: Final = re.compile("[\0\ud800-\udfff]")
MAX_DOCUMENT_BYTES: Final = 1 << 27
"""Size of the longest document that is kept: the steps take up to twenty bytes of memory for a byte of text."""
_PLACES: Final = 20
"""Positions of a source that are read in turn for a sample."""


@dataclass(frozen=True)
class Part:
    """A part of a source, which has either ``page`` or ``source``.

    Attributes:
        label: Name in errors, and prefix of the ids of its documents.
        page: Path of an HTML or WARC file.
        source: Rows of a file, of a range of a file, or of a shard of a dataset.
        num_bytes: Size in bytes; ``None`` if unknown.
    """

    label: str
    page: Path | None = None
    source: Source | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class FileRange:
    """Rows in a range of a large file: bytes of a JSON Lines file, or row groups of Parquet.

    Attributes:
        name: Name in errors.
        path: Path of the file.
        start: First byte, at the start of a line, or first row group.
        stop: End of the range, exclusive.
    """

    name: str
    path: Path
    start: int
    stop: int
    streaming = False

    def rows(self) -> Iterator[Entry]:
        """Yield the rows and problems of the range.

        Raises:
            DataError: The range cannot be read further.
            OSError: The file cannot be opened.
        """
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            if self.path.suffix == _PARQUET:
                yield from read_parquet(file, self.name, range(self.start, self.stop))
                return
            lines = io.BufferedReader(file.get_stream(self.start, self.stop - self.start), 1 << 20)
            yield from read_json_lines(enumerate_lines(lines, self.name), self.name)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file's digest and the range."""
        content = f"{local_files.compute_digest(self.path).hex()} {self.start} {self.stop}"
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class CorpusInput:
    """A source of the corpus.

    Attributes:
        label: Value of ``source`` in its documents.
        kind: Kind of the source, which selects the quality preset.
        entry: The entry of ``sources`` in the configuration.
        tasks: Parts of each task, in document order.
        fingerprint: SHA-256 of the content.
    """

    label: str
    kind: str
    entry: Mapping[str, Any]
    tasks: tuple[tuple[Part, ...], ...]
    fingerprint: str


def open_inputs(config: CorpusConfig, *, streams: bool = False) -> list[CorpusInput]:
    """Find the files and datasets of all sources, and split them into tasks.

    Args:
        config: The corpus configuration.
        streams: Stream Hub datasets instead of downloading them, where only sizes and first rows are needed.

    Raises:
        DataError: A source cannot be found or read.
    """
    streamed = {"streaming": True} if streams else {}
    return [_open({**entry, **streamed}, config.task_megabytes << 20) for entry in config.sources]


def count_input_bytes(source: CorpusInput) -> int | None:
    """Return the size of a source's files, or of a Hub dataset, in bytes; ``None`` if unknown."""
    sizes = [part.num_bytes for task in source.tasks for part in task]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _open(entry: Mapping[str, Any], task_bytes: int) -> CorpusInput:
    label, kind = label_entry(entry), entry.get("kind", "text")
    path = Path(entry["name"])
    pages = _find_pages(path)
    if pages:
        root = path if path.is_dir() else path.parent
        named = [(escape_surrogates(str(page.relative_to(root))), page) for page in pages]
        try:
            parts = [Part(f"{label}/{name}", page, num_bytes=page.stat().st_size) for name, page in named]
            digests = b"".join(name.encode() + local_files.compute_digest(page) for name, page in named)
        except OSError as error:
            found = f"cannot be read: {error.strerror or error}"
            raise DataError(Problem(str(error.filename), found, "correct its permissions, or move it away")) from error
        fingerprint = hashlib.sha256(digests).hexdigest()
    else:
        source = open_entry(entry, text_documents="file")
        # First, because it reports files that cannot be read.
        fingerprint = source.fingerprint()
        parts = list(split_source(source, label, task_bytes))
    return CorpusInput(label, kind, entry, tuple(_group(parts, task_bytes)), fingerprint)


def _find_pages(path: Path) -> list[Path]:
    """Return the HTML and WARC files of a source, which row readers do not support; of a folder recursively, sorted.

    Raises:
        DataError: The folder also contains files of other kinds, or cannot be read.
    """
    files = [path] if path.is_file() else local_files.list_files(path, str(path)) if path.is_dir() else []
    pages: dict[str, Path] = {}  # By real path: a file with several names is read once.
    for file in files:
        # Not the report of a corpus, which is beside its data.
        is_report = file.name == "report.html" and file.with_name("corpus.json").exists()
        if file.name.lower().endswith((*_HTML, *_WARC)) and not is_report:
            pages.setdefault(realpath(file), file)
    others = [file for file in files if local_files.find_suffix(file) in local_files.READERS]
    # Sphinx puts the source of each page beside its site.
    others = [file for file in others if "_sources" not in file.relative_to(path).parts]
    if pages and others:
        found = f"the folder mixes pages and other data: {next(iter(pages.values())).name}, {others[0].name}"
        raise DataError(Problem(str(path), found, "put them into two folders, and name both as sources"))
    if pages:  # Archives and compressed pages would be lost silently among images and style sheets.
        others = [file for file in files if not file.name.lower().endswith((*_HTML, *_WARC))]
        local_files.warn_of_ignored(others, path, str(path))
    return list(pages.values())


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
    else:
        assert isinstance(source, local_files.FileSource)
        for name, path in source.files.items():
            # With the path relative to the folder, because files in two subfolders can have the same name.
            short = f"{label}{escape_surrogates(name.removeprefix(source.name.rstrip('/')))}"
            size = path.stat().st_size
            # Two borders are one range, the whole file.
            borders = _find_borders(path, size, -(-size // task_bytes))
            if len(borders) < 3:
                yield Part(short, source=replace(source, files={name: path}), num_bytes=size)
                continue
            for start, stop in itertools.pairwise(borders):
                # Rows are numbered from the start of a range of lines, but from the start of a Parquet file.
                place = f"{short}@{start}" if start and path.suffix in _LINES else short
                share = size * (stop - start) // borders[-1]
                yield Part(place, source=FileRange(place, path, start, stop), num_bytes=share)


def _find_borders(path: Path, size: int, num: int) -> list[int]:
    """Return the borders of at most ``num`` ranges of a file, in bytes or row groups; empty if it cannot be split."""
    if num < 2:
        return []
    try:
        if local_files.find_codec(path) is not None:
            return []
        if path.suffix in _LINES and not _is_array(path):
            return [0, *(_find_line(path, size * at // num) for at in range(1, num)), size]
        if path.suffix == _PARQUET:
            import pyarrow.parquet as pq

            num_groups = pq.read_metadata(path.absolute()).num_row_groups
            return sorted({num_groups * at // num for at in range(num + 1)})
    except (OSError, ValueError, DataError):  # The file is read as one part, whose reader reports the error.
        pass
    return []


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _find_line(path: Path, offset: int) -> int:
    """Return the position of the first line that begins at or after ``offset``, at least 1, in bytes."""
    with path.open("rb") as file:
        # From one byte before: if that is a line feed, a line begins at ``offset`` itself.
        file.seek(offset - 1)
        file.readline()
        return file.tell()


def _group(parts: Iterable[Part], task_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Group consecutive small parts into tasks of at most ``task_bytes``."""
    group: list[Part] = []
    size = 0
    for part in parts:
        # A shard of a Hub dataset and a part of unknown size are a task of their own.
        num_bytes = task_bytes if part.num_bytes is None or isinstance(part.source, HubSource) else part.num_bytes
        if group and size + num_bytes > task_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += num_bytes
    yield tuple(group)


class Read(PipelineStep):  # type: ignore[misc]
    """First pipeline block: reads the documents of a task, and counts empty, too long and unreadable ones."""

    type, name = "READ", READ

    def __init__(self, source: CorpusInput, ledger: Ledger, *, raises: bool, repairs: bool = False) -> None:
        """Read ``source``.

        Args:
            source: The source.
            ledger: Counts the documents.
            raises: Raise for the first unreadable record instead of counting it.
            repairs: Whether ``fix_text`` is applied to its texts.
        """
        super().__init__()
        self.source, self.ledger, self.raises = source, ledger, raises
        self.repairs = repairs and source.kind != "chat"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task ``rank``.

        Raises:
            DataError: A record cannot be read and ``raises`` is set, or a document does not fit the source's kind.
            ReadFailedError: A disk or network failed.
        """
        tally = self.ledger.tallies[READ]
        for part in self.source.tasks[rank]:
            for found in self._read(part):
                if isinstance(found, Problem):
                    self._reject(found)
                    continue
                self._verify_kind(found)
                found.metadata[SOURCE] = self.source.label
                if self.source.entry.get("html"):
                    found.metadata[HTML] = True
                size = count_bytes(found.text)
                tally.count_in(size)
                if not found.text.strip():
                    self.ledger.remove(READ, "empty", found)
                elif size > MAX_DOCUMENT_BYTES:
                    self.ledger.remove(READ, f"longer than {MAX_DOCUMENT_BYTES:,} bytes", found)
                else:
                    tally.count_out(size)
                    yield found

    def _verify_kind(self, document: Document) -> None:
        """Raise for a chat in a source of texts, whose columns would be lost, and for a text in a source of chats."""
        if self.source.kind == ANY or (CHAT in document.metadata) == (self.source.kind == "chat"):
            return
        found, remedy = "is a text", "remove `kind: chat`"
        if CHAT in document.metadata:
            found, remedy = f"is a chat or has an answer, and the kind is `{self.source.kind}`", "write `kind: chat`"
        where = f"{self.source.entry['name']}: {document.id}"
        raise DataError(Problem(where, found, f"{remedy}; name files of the other kind as a source of their own"))

    def _reject(self, problem: Problem) -> None:
        if self.raises:
            remedy = problem.remedy or "fix it"
            raise DataError(replace(problem, remedy=f"{remedy}, or set `broken_rows: drop` to skip and count it"))
        tally = self.ledger.tallies[READ]
        tally.documents_in += 1
        tally.removed["cannot be read"] += 1
        if len(self.ledger.notes) < self.ledger.max_notes:
            self.ledger.notes.append(escape_surrogates(f"{problem.where}: {problem.found}"))

    def _read(self, part: Part) -> Iterator[Document | Problem]:
        try:
            if part.source is not None:
                yield from read_documents(part.source.rows(), part.label, repairs=self.repairs)
            elif part.page is not None:
                is_warc = part.page.name.lower().endswith(_WARC)
                yield from read_warc(part.page, part.label) if is_warc else [read_page(part.page, part.label)]
        except OSError as error:
            found = f"cannot be read: {error.strerror or error}"
            raise ReadFailedError(Problem(part.label, found, "run the same command again")) from error


def read_documents(entries: Iterable[Entry], label: str, *, repairs: bool = False) -> Iterator[Document | Problem]:
    """Yield each row as a document or a problem; the first valid row determines the layout of all rows.

    Args:
        entries: Rows and problems of a source.
        label: Prefix of the ids of documents whose row has no ``id``.
        repairs: Remove NUL characters from texts, and join halves of a surrogate pair or replace them by U+FFFD, as
            ftfy does; otherwise the rows are problems, for no tokenizer encodes them.
    """
    row_format: RowFormat | None = None
    for entry in entries:
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            if row_format is None:
                row_format = detect_format(entry)
            for name in row_format.columns if repairs else ():
                if isinstance(text := entry.columns.get(name), str) and _UNENCODABLE.search(text):
                    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                    entry.columns[name] = whole.replace("\0", "")
            row = canonicalize(entry, row_format)
            yield _to_document(row, entry, label, row_format)
        except DataError as error:
            yield error.problems[0]


def _to_document(row: Row, entry: RawRow, label: str, row_format: RowFormat) -> Document:
    row_id = entry.columns.get("id")
    has_id = row_id is not None and not isinstance(row_id, dict | list)
    name = escape_surrogates(str(row_id)) if has_id else f"{label}:{entry.index}"
    used = {*row_format.columns, "id"}
    metadata = {column: value for column, value in entry.columns.items() if column not in used}
    if row.text is not None:
        return Document(text=row.text, id=name, metadata=metadata)
    # Converted to JSON values, as the chat is stored.
    columns = json.loads(json.dumps(list_columns(row), default=str))
    text, emptied = split_chat(columns)
    # `join_chat` would split a message at a separator of its own.
    if PART_END in json.dumps(columns, ensure_ascii=False):
        found = f"contains the character U+{ord(PART_END):04X}, which is reserved as separator of messages"
        raise DataError(Problem(row.where, found, "remove the character"))
    # The row that determined the layout may have no `tools`, which are read from this one.
    metadata = {column: value for column, value in metadata.items() if column not in columns}
    return Document(text=text, id=name, metadata={**metadata, CHAT: emptied})


def list_columns(row: Row) -> dict[str, Any]:
    """Return the dataset columns of a chat, or of a prompt with its answers: the inverse of ``canonicalize``."""
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
    """Read an HTML file; return a problem if it is too large.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_PAGE_BYTES + 1)
    if len(data) > MAX_PAGE_BYTES:
        return Problem(label, f"is longer than {MAX_PAGE_BYTES:,} bytes")
    return Document(text=decode_page(data), id=label, metadata={HTML: True})


def interleave_rows(source: Source) -> Iterator[Entry]:
    """Yield rows and problems from several parts of a source in turn, so that the first ones are representative."""
    # Fewer for a stream, where each part is a file on the network.
    places = 4 if source.streaming else _PLACES
    size = sum(part.num_bytes or 0 for part in split_source(source, source.name, sys.maxsize))
    parts = [part.source or source for part in split_source(source, source.name, -(-size // places) or 1)]
    # Every stride-th part first, so that the first rows come from all parts of the source.
    stride = -(-len(parts) // places)
    waiting = [parts[at].rows() for first in range(stride) for at in range(first, len(parts), stride)]
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

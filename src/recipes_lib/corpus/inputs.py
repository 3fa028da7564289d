"""Sources as tasks of bounded size, and the documents of a task: local files in parts, HTML, WARC, Hub datasets."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib.config.corpus import CorpusConfig, label_entry
from recipes_lib.corpus.documents import PART_END, Ledger, StepTally, count_bytes
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.hub_datasets import HubSource
from recipes_lib.data.sources.local_files import IGNORED_NAMES, READERS, FileSource, compute_digest, open_file
from recipes_lib.data.sources.readers import BrokenFileError
from recipes_lib.data.sources.rows import Entry, RawRow, Row, Source
from recipes_lib.errors import DataError, Problem

READ: Final = "read"
"""Name of the first step."""
_HTML: Final = (".html", ".htm", ".xhtml")
_WARC: Final = (".warc", ".wet", ".warc.gz", ".wet.gz")
_LINES: Final = (".jsonl", ".ndjson")
_MAX_HTML_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Part:
    """A piece of a source: a file, a range of a file's lines, or a share of a dataset.

    Attributes:
        label: As errors and ids call it.
        path: The file; ``None`` for a dataset.
        start: First byte of the range.
        stop: Byte after the range; ``None``: to the end.
        source: Where the rows come from when it is no HTML, WARC or range.
    """

    label: str
    path: Path | None = None
    start: int = 0
    stop: int | None = None
    source: Source | None = None


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


def open_inputs(config: CorpusConfig) -> list[CorpusInput]:
    """Find the files and datasets of all sources.

    Raises:
        DataError: One cannot be found or read.
    """
    return [_open(entry, config.task_megabytes << 20) for entry in config.sources]


def count_input_bytes(source: CorpusInput) -> int | None:
    """Return the bytes of a source's files, or of a Hub dataset as it is stored; ``None`` where that is not known."""
    parts = [part for task in source.tasks for part in task]
    if all(part.path is not None for part in parts):
        return sum((part.stop or part.path.stat().st_size) - part.start for part in parts if part.path is not None)
    first = parts[0].source
    size = first.dataset.dataset_size if isinstance(first, HubSource) and not first.streaming else None
    return None if size is None else int(size)


def _open(entry: Mapping[str, Any], task_bytes: int) -> CorpusInput:
    label, kind = label_entry(entry), entry.get("kind", "text")
    path = Path(entry["name"])
    pages = _find_pages(path)
    if pages:
        names = [str(page.relative_to(path)) if path.is_dir() else page.name for page in pages]
        parts = [Part(f"{label}/{name}", page) for name, page in zip(names, pages, strict=True)]
        digests = b"".join(name.encode() + compute_digest(page) for name, page in zip(names, pages, strict=True))
        fingerprint = hashlib.sha256(digests).hexdigest()
    else:
        source = load_source(
            entry["name"],
            config=entry.get("config"),
            revision=entry.get("revision"),
            split=entry.get("split", "train"),
            columns=entry.get("columns"),
            streaming=entry.get("streaming", False),
            text_documents=entry.get("text_documents", "file"),
        )
        parts, fingerprint = list(_split(source, label, task_bytes)), source.fingerprint()
    return CorpusInput(label, kind, entry, tuple(_group(parts, task_bytes)), fingerprint)


def _find_pages(path: Path) -> list[Path]:
    """HTML and WARC files, which no reader of rows knows; in a folder all below it, sorted.

    Raises:
        DataError: Other data files lie beside them.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    files = [file for file in files if file.is_file() and not file.name.startswith(".")]
    pages = [file for file in files if file.name.lower().endswith((*_HTML, *_WARC))]
    others = [file for file in files if file.suffix.lower() in READERS and file.name not in IGNORED_NAMES]
    if pages and others:
        found = f"the folder mixes pages and other data: {pages[0].name}, {others[0].name}"
        raise DataError(Problem(str(path), found, "put them into two folders, and name both as sources"))
    return pages


def _split(source: Source, label: str, task_bytes: int) -> Iterator[Part]:
    if isinstance(source, HubSource):
        dataset = source.dataset
        num = dataset.num_shards if source.streaming else max(1, (dataset.dataset_size or 0) // task_bytes)
        for index in range(num):
            shard = dataset.shard(num_shards=num, index=index) if num > 1 else dataset
            yield Part(f"{label}/{index}", source=replace(source, dataset=shard))
    elif isinstance(source, FileSource):
        for name, path in source.files.items():
            short = f"{label}/{path.name}" if len(source.files) > 1 else label
            size = path.stat().st_size
            if path.suffix in _LINES and size > task_bytes and not _is_array(path):
                num = -(-size // task_bytes)
                borders = [_find_line(path, size * at // num) for at in range(num)] + [size]
                for start, stop in itertools.pairwise(borders):
                    yield Part(f"{short}@{start}" if start else short, path, start, stop)
            else:
                yield Part(short, path, source=replace(source, files={name: path}))
    else:
        yield Part(label, source=source)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _find_line(path: Path, offset: int) -> int:
    """The first byte at or after ``offset`` at which a line begins."""
    if offset == 0:
        return 0
    with path.open("rb") as file:
        file.seek(offset - 1)
        file.readline()
        return file.tell()


def _group(parts: Iterable[Part], task_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Small files share a task."""
    group: list[Part] = []
    size = 0
    for part in parts:
        own = 0
        if part.path is not None:
            own = (part.stop or part.path.stat().st_size) - part.start
        if group and size + own > task_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += own if part.path is not None else task_bytes
    if group:
        yield tuple(group)


class Read(PipelineStep):  # type: ignore[misc]
    """The documents of a task; what cannot be read is counted."""

    type, name = "READ", READ

    def __init__(self, source: CorpusInput, ledger: Ledger, *, raises: bool) -> None:
        """Read ``source``; ``raises``: the first thing that cannot be read is an error."""
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
                found.metadata["source"] = self.source.label
                size = count_bytes(found.text)
                tally.documents_in += 1
                tally.bytes_in += size
                if not found.text.strip():
                    self.ledger.remove(READ, "empty", found)
                    continue
                tally.documents_out += 1
                tally.bytes_out += size
                yield found

    def _refuse(self, problem: Problem, tally: StepTally) -> None:
        if self.raises:
            remedy = problem.remedy or "mend it"
            raise DataError(replace(problem, remedy=f"{remedy}, or write `broken_rows: drop`, which counts it"))
        tally.documents_in += 1
        tally.removed["cannot be read"] += 1
        if len(self.ledger.notes) < self.ledger.max_notes:
            self.ledger.notes.append(f"{problem.where}: {problem.found}")

    def _read(self, part: Part) -> Iterator[Document | Problem]:
        if part.source is None and part.stop is None:
            assert part.path is not None
            try:
                if part.path.name.lower().endswith(_WARC):
                    yield from read_warc(part.path, part.label)
                else:
                    yield read_page(part.path, part.label)
            except OSError as error:
                yield Problem(part.label, f"cannot be read: {error.strerror or error}")
            return
        try:
            yield from read_documents(_read_range(part) if part.source is None else part.source.rows(), part.label)
        except DataError as error:
            yield from error.problems
        except BrokenFileError as error:
            yield error.problem


def _read_range(part: Part) -> Iterator[Entry]:
    assert part.path is not None
    assert part.stop is not None
    with open_file(part.path) as file:
        ranged = cast(io.BufferedReader, io.BufferedReader(_ByteRange(file, part.start, part.stop), 1 << 20))
        yield from READERS[".jsonl"](ranged, part.label)


class _ByteRange(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: io.BufferedReader, start: int, stop: int) -> None:
        self._file, self._left = file, stop - start
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def read_documents(entries: Iterable[Entry], label: str) -> Iterator[Document | Problem]:
    """Yield each row as a document, or the problem that stands in its place; the first sound row says the layout."""
    row_format: RowFormat | None = None
    for entry in entries:
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            if row_format is None:
                row_format = detect_format(entry.columns, "auto", where=entry.where)
            row = canonicalize(entry.columns, row_format, entry.source, entry.index, entry.index_name)
        except DataError as error:
            yield error.problems[0]
            continue
        yield _to_document(row, entry, label)


def _to_document(row: Row, entry: RawRow, label: str) -> Document:
    given = entry.columns.get("id")
    name = f"{label}:{entry.index}" if given is None or isinstance(given, dict | list) else str(given)
    metadata: dict[str, Any] = {}
    if row.text is not None:
        text = row.text
        metadata = {key: value for key, value in entry.columns.items() if key not in ("text", "id", "source")}
    elif row.messages is not None:
        # What is not text, as images and tool calls are, stays as it is.
        texts = [message["content"] for message in row.messages if isinstance(message.get("content"), str)]
        text = PART_END.join(texts)
        metadata["row"] = json.loads(json.dumps({"messages": row.messages, "tools": row.tools}, default=str))
    else:
        text = PART_END.join((row.prompt or "", row.completion or ""))
        metadata["row"] = {"prompt": row.prompt, "completion": row.completion}
    return Document(text=text, id=name, metadata=metadata)


def read_page(path: Path, label: str) -> Document | Problem:
    """Read an HTML file, in whatever encoding it is."""
    from trafilatura.utils import decode_file

    with path.open("rb") as file:
        data = file.read(_MAX_HTML_BYTES + 1)
    if len(data) > _MAX_HTML_BYTES:
        return Problem(label, f"more than {_MAX_HTML_BYTES:,} bytes are no web page")
    return Document(text=decode_file(data), id=label, metadata={"html": True})


def read_warc(path: Path, label: str) -> Iterator[Document | Problem]:
    """Yield the pages of a WARC file and the texts of a WET file; what breaks off is a problem."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    number = 0
    with path.open("rb") as file:
        try:
            for number, record in enumerate(ArchiveIterator(file), start=1):
                if record.rec_type in ("response", "conversion"):
                    yield from _read_record(record, f"{label}:{number}")
            if number == 0:
                yield Problem(label, "holds no whole WARC record")
        except (ArchiveLoadFailed, OSError, EOFError, ValueError) as error:
            yield Problem(f"{label}:{number + 1}", f"not a whole WARC record: {error}")


def _read_record(record: Any, where: str) -> Iterator[Document | Problem]:
    from trafilatura.utils import decode_file

    headers, is_page = record.rec_headers, record.rec_type == "response"
    payload = headers.get_header("WARC-Identified-Payload-Type") or "html"
    if is_page and "html" not in payload:
        return
    content = record.content_stream().read(_MAX_HTML_BYTES)
    # warcio says nothing of a record without a length, or with less than it promises.
    if headers.get_header("Content-Length") is None or record.raw_stream.limit:
        yield Problem(where, "not a whole WARC record, or too long for a page")
        return
    metadata = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
    metadata |= {"html": True} if is_page else {}
    name = headers.get_header("WARC-Record-ID") or where
    yield Document(text=decode_file(content), id=name.strip("<>"), metadata=metadata)

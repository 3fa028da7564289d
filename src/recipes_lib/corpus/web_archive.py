"""WARC and WET files: records that survive damaged neighbours."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from datatrove.data import Document

from recipes_lib.corpus.documents import HTML
from recipes_lib.errors import Problem

MAX_PAGE_BYTES: Final = 1 << 28
"""Longer pages and records are counted as unreadable."""
_WARC_BLOCK: Final = 1 << 16
_RECORD: Final = b"WARC/"
"""What a record begins with."""
_HEADER: Final = re.compile(rb"WARC/\d.*?(?:\r\n\r\n|\n\n)", re.DOTALL)
_LENGTH: Final = re.compile(rb"^content-length:[ \t]*(\d+)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_BLANK_BYTES: Final = 64
"""Blank lines after a record, two by the standard, and the beginning of the next one."""
_GZIP: Final = b"\x1f\x8b\x08"
_GZIP_WBITS: Final = zlib.MAX_WBITS | 16
_GZIP_HEAD: Final = 1 << 9
"""Bytes in which the first line of a compressed record is."""


def read_warc(path: Path, label: str) -> Iterator[Document | Problem]:
    """Yield the pages of a WARC file and the texts of a WET file; each damaged stretch is a problem.

    datatrove's ``WarcReader`` ends the task at a damaged record, does not count pages that it cannot decode, and needs
    libmagic. warcio, which parses single records here, reads a wrong length into the neighbours, and of a file that is
    one gzip member only the first record.
    """
    number = start = 0
    with path.open("rb") as file:
        head = file.peek(len(_RECORD))
        is_gzip = head.startswith(_GZIP) or (path.suffix.lower() == ".gz" and not head.startswith(_RECORD))
        while start >= 0:
            damaged: list[int] = []
            record: bytes | str = b""
            blocks = _decompress(file, start, damaged) if is_gzip else iter(lambda: file.read(_WARC_BLOCK), b"")
            for record in _split_records(blocks):
                number += 1
                if isinstance(record, str):
                    yield Problem(f"{label}:{number}", f"not a whole WARC record: {record}")
                else:
                    yield from _read_record(record, f"{label}:{number}")
            # The record that the damage cut is told already.
            if damaged and not isinstance(record, str):
                number += 1
                yield Problem(f"{label}:{number}", "not a whole WARC record: it is in damaged gzip data")
            # From the start of the damaged member: its data may have led the decoder into the next one.
            start = _find_member(file, damaged[0] + 1) if damaged else -1
    if number == 0:
        yield Problem(label, "holds no whole WARC record")


def _decompress(file: io.BufferedReader, start: int, damaged: list[int]) -> Iterator[bytes]:
    """Yield the bytes of gzip members from ``start`` on; at damaged data, end and append the start of their member."""
    file.seek(start)
    pending, decoder = b"", zlib.decompressobj(_GZIP_WBITS)
    try:
        while pending := pending or file.read(_WARC_BLOCK):
            # A bounded output: a megabyte can decompress to a gigabyte.
            yield decoder.decompress(pending, _WARC_BLOCK)
            pending = decoder.unconsumed_tail
            if decoder.eof:
                pending, decoder = decoder.unused_data, zlib.decompressobj(_GZIP_WBITS)
                start = file.tell() - len(pending)
        yield decoder.flush()
        if file.tell() > start:
            damaged.append(start)
    except zlib.error:
        damaged.append(start)


def _find_member(file: io.BufferedReader, start: int) -> int:
    """Return the position of the next gzip member that begins with a WARC record; -1: there is none."""
    overlap = b""
    file.seek(start)
    while block := file.read(_WARC_BLOCK):
        data, first = overlap + block, file.tell() - len(block) - len(overlap)
        for found in re.finditer(re.escape(_GZIP), data):
            # Compressed data contain the three bytes by chance, every 16 MB.
            head = data[found.start() : found.start() + _GZIP_HEAD]
            with suppress(zlib.error):
                if zlib.decompressobj(_GZIP_WBITS).decompress(head, len(_RECORD)) == _RECORD:
                    return first + found.start()
        overlap = data[-_GZIP_HEAD:]
    return -1


def _split_records(blocks: Iterator[bytes]) -> Iterator[bytes | str]:
    """Yield each WARC record, or what is wrong in place of a damaged one.

    A length is right if the record ends where another one begins, or the file ends. Of a record with a wrong one, the
    end is the next line that begins a record, so that no neighbour is lost.
    """
    data = bytearray()

    def fill(size: int) -> bool:
        while len(data) < size and (block := next(blocks, None)) is not None:
            data.extend(block)
        return len(data) >= size

    while fill(1):
        # Blank lines end a record; the file may end with more of them.
        if data.startswith((b"\r", b"\n")):
            del data[: len(data) - len(data.lstrip(b"\r\n"))]
            continue
        size, found = _measure(data, fill)
        if not found:
            yield bytes(data[:size])
            del data[:size]
            continue
        yield found
        while (start := data.find(b"\n" + _RECORD, size)) < 0:
            # A part of the mark may stand at the end of what was read.
            del data[: -len(_RECORD)]
            size = 0
            if not fill(len(data) + 1):
                return
        del data[: start + 1]


def _measure(data: bytearray, fill: Callable[[int], bool]) -> tuple[int, str]:
    """Return the size of the record that ``data`` begin with; of a damaged one, where to search, and what is wrong."""
    fill(_MAX_HEADER_BYTES)
    header = _HEADER.match(data, 0, _MAX_HEADER_BYTES)
    if header is None:
        return 0, "it does not begin with a header"
    length = _LENGTH.search(data, 0, header.end())
    # The line end of the header can be the one before the next record.
    after = header.end() - 1
    if length is None:
        return after, "it has no length"
    if int(length[1]) > MAX_PAGE_BYTES:
        return after, f"its length is {int(length[1]):,}, too long for a page"
    end = header.end() + int(length[1])
    is_whole = fill(end)
    fill(end + _MAX_BLANK_BYTES)
    following = data[end : end + _MAX_BLANK_BYTES]
    is_next = _RECORD.startswith(following.lstrip(b"\r\n")[: len(_RECORD)])
    # What follows may be damaged itself; then two line ends count, but not those inside of a swallowed record.
    is_next |= following.startswith(b"\r\n\r\n") and data.find(b"\n" + _RECORD, header.end(), end) < 0
    if is_whole and is_next:
        return end, ""
    return after, f"its length is {int(length[1]):,}, and neither a record nor the end of the file follows"


def _read_record(data: bytes, where: str) -> Iterator[Document | Problem]:
    from trafilatura.utils import decode_file
    from warcio.recordloader import ArcWarcRecordLoader

    try:
        # warcio takes apart HTTP headers, chunks and content encodings.
        record = ArcWarcRecordLoader().parse_record_stream(io.BytesIO(data), known_format="warc")
        headers, is_page = record.rec_headers, record.rec_type == "response"
        payload = headers.get_header("WARC-Identified-Payload-Type") or "html"
        if record.rec_type not in ("response", "conversion") or (is_page and "html" not in payload):
            return
        content = record.content_stream().read(MAX_PAGE_BYTES + 1)
    except Exception as error:  # Of a damaged header any, as an AttributeError without WARC-Target-URI (warcio 1.8).
        yield Problem(where, f"not a whole WARC record: {ascii(str(error))[1:-1]:.120}")
        return
    if len(content) > MAX_PAGE_BYTES:
        yield Problem(where, f"more than {MAX_PAGE_BYTES:,} bytes are no web page")
        return
    metadata = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
    metadata |= {HTML: True} if is_page else {}
    name = headers.get_header("WARC-Record-ID") or where
    yield Document(text=decode_file(content), id=name.strip("<>"), metadata=metadata)

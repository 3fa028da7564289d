"""Reader of WARC and WET files that recovers after damaged records."""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from datatrove.data import Document

from recipes_lib.corpus.documents import HTML
from recipes_lib.errors import Problem

MAX_PAGE_BYTES: Final = 1 << 28
"""Size of the longest page or record that is read."""
_WARC_BLOCK: Final = 1 << 16
"""Bytes read, and bytes decompressed, at a time."""
_RECORD: Final = b"WARC/"
"""First bytes of a record."""
_HEADER: Final = re.compile(rb"WARC/\d.*?(?:\r\n\r\n|\n\n)", re.DOTALL)
_LENGTH: Final = re.compile(rb"^content-length:[ \t]*(\d+)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_BLANK_BYTES: Final = 64
"""Bytes after a record that are examined: blank lines, two by the standard, and the first bytes of the next record."""
_GZIP: Final = b"\x1f\x8b\x08"
_GZIP_WBITS: Final = zlib.MAX_WBITS | 16
_GZIP_HEAD: Final = 1 << 9
"""First bytes of a gzip member that are enough to decompress ``_RECORD``."""
_CODECS: Final = {"br": "brotli", "zstd": "zstd"}
"""Content encoding of HTTP -> pyarrow's name."""
_CHUNK: Final = re.compile(rb"([0-9a-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n", re.IGNORECASE)
"""Size of a chunk of an HTTP body, with its extension."""
_ERROR: Final = re.compile(r"\S+ [345]\d\d")
"""Status line, after ``HTTP/``, of a redirect or error."""
_CHARSET: Final = re.compile(r"charset=[\s\"']*([\w.:-]+)", re.IGNORECASE)
_PAGE_CHARSET: Final = re.compile(
    r"<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)=[\s\"']*(?!utf)([\w.:-]+)", re.IGNORECASE
)
"""Charset that a page states itself; not UTF-8, which is tried first, nor UTF-16, in which this could not be read."""
_PAGE_HEAD: Final = 1 << 12
"""Bytes of a page that are searched for its charset; browsers search at least 1,024."""
_BROWSER_CODECS: Final = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso-8859-8-i": "iso8859-8",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "windows-874": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "windows-31j": "cp932",
    "euc_jp": "euc_jis_2004",
    "euc_kr": "cp949",
    "windows-949": "cp949",
}
"""Charset without `x-`, or Python's codec -> codec that browsers read under this name (WHATWG Encoding Standard)."""


def read_warc(path: Path, label: str) -> Iterator[Document | Problem]:
    """Yield the HTML pages of a WARC file, or the texts of a WET file; a problem for each damaged section.

    datatrove's ``WarcReader`` ends the task at a damaged record, does not count pages that it cannot decode, and needs
    libmagic. warcio, which parses single records here, reads beyond a record whose length is wrong, and only the first
    record of a file that is one gzip member.

    Args:
        path: Path of the file, compressed or not.
        label: Prefix of the place in a problem; the number of the record follows.

    Raises:
        OSError: The file cannot be read.
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
            # Unless `_split_records` has reported the record that the damage truncated.
            if damaged and not isinstance(record, str):
                number += 1
                yield Problem(f"{label}:{number}", "not a whole WARC record: it is in damaged gzip data")
            # From the start of the damaged member: the decoder may have read beyond it into the next one.
            start = _find_member(file, damaged[0] + 1) if damaged else -1
    if number == 0:
        yield Problem(label, "holds no whole WARC record")


def _decompress(file: io.BufferedReader, start: int, damaged: list[int]) -> Iterator[bytes]:
    """Yield the decompressed gzip members from ``start`` on, up to a damaged one; append its start to ``damaged``."""
    file.seek(start)
    pending, decoder = b"", zlib.decompressobj(_GZIP_WBITS)
    try:
        while pending := pending or file.read(_WARC_BLOCK):
            # Bound the output: a megabyte can decompress to a gigabyte.
            yield decoder.decompress(pending, _WARC_BLOCK)
            pending = decoder.unconsumed_tail
            if decoder.eof:
                pending, decoder = decoder.unused_data, zlib.decompressobj(_GZIP_WBITS)
                start = file.tell() - len(pending)
        if file.tell() > start:
            damaged.append(start)
    except zlib.error:
        damaged.append(start)


def _find_member(file: io.BufferedReader, start: int) -> int:
    """Return the position of the first gzip member after ``start`` that begins with a WARC record; -1 if none does."""
    overlap = b""
    file.seek(start)
    while block := file.read(_WARC_BLOCK):
        data, first = overlap + block, file.tell() - len(block) - len(overlap)
        for found in re.finditer(re.escape(_GZIP), data):
            # Verify by decompressing: the three bytes occur by chance in every 16 MB of compressed data.
            head = data[found.start() : found.start() + _GZIP_HEAD]
            with suppress(zlib.error):
                if zlib.decompressobj(_GZIP_WBITS).decompress(head, len(_RECORD)) == _RECORD:
                    return first + found.start()
        overlap = data[-_GZIP_HEAD:]
    return -1


def _split_records(blocks: Iterator[bytes]) -> Iterator[bytes | str]:
    """Yield each WARC record as bytes, or for a damaged one a description of the damage.

    A record's length is accepted if another record, or the end of the file, follows. Otherwise reading continues at
    the next line that begins a record, so that the records after a wrong length are not lost.
    """
    data = bytearray()

    def fill(size: int) -> bool:
        while len(data) < size and (block := next(blocks, None)) is not None:
            data.extend(block)
        return len(data) >= size

    while fill(1):
        # Skip the blank lines after a record; there may be more of them at the end of the file.
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
            # Keep the last bytes, which can be the first part of a split `_RECORD`.
            del data[: -len(_RECORD)]
            size = 0
            if not fill(len(data) + 1):
                return
        del data[: start + 1]


def _measure(data: bytearray, fill: Callable[[int], bool]) -> tuple[int, str]:
    """Return the size of the record at the start of ``data``, and an empty text.

    For a damaged record: the position from which to search for the next one, and a description of the damage.
    """
    fill(_MAX_HEADER_BYTES)
    header = _HEADER.match(data, 0, _MAX_HEADER_BYTES)
    if header is None:
        return 0, "it does not begin with a header"
    length = _LENGTH.search(data, 0, header.end())
    # One byte before the end of the header: its last line feed can be the one before the next record.
    after = header.end() - 1
    if length is None:
        return after, "it has no length"
    if int(length[1]) > MAX_PAGE_BYTES:
        return after, f"its length is {int(length[1]):,}, too long for a page"
    end = header.end() + int(length[1])
    is_whole = fill(end)
    if not is_whole and data.find(b"\n" + _RECORD, after) < 0:
        return after, f"the file ends after {len(data) - header.end():,} of its {int(length[1]):,} bytes"
    fill(end + _MAX_BLANK_BYTES)
    following = data[end : end + _MAX_BLANK_BYTES]
    is_next = _RECORD.startswith(following.lstrip(b"\r\n")[: len(_RECORD)])
    # The next record may itself be damaged: then two line ends are accepted, unless this record contains another one.
    is_next |= following.startswith(b"\r\n\r\n") and data.find(b"\n" + _RECORD, header.end(), end) < 0
    if is_whole and is_next:
        return end, ""
    return after, f"its length is {int(length[1]):,}, and neither a record nor the end of the file follows"


def _read_record(data: bytes, where: str) -> Iterator[Document | Problem]:
    from warcio.recordloader import ArcWarcRecordLoader

    try:
        # warcio parses HTTP headers.
        loader = ArcWarcRecordLoader()
        loader.http_parser.statuslist = ["HTTP/"]  # warcio 1.8 does not read HTTP/2, which browsers record.
        record = loader.parse_record_stream(io.BytesIO(data), known_format="warc")
        # `resource` records are of programs that archive files instead of responses, such as warcit.
        headers, is_page = record.rec_headers, record.rec_type in ("response", "resource")
        # Only some crawlers identify the type, such as Common Crawl's; the others have that of the server.
        sent = (record.http_headers or headers).get_header("Content-Type")
        payload = headers.get_header("WARC-Identified-Payload-Type") or sent or "html"
        if record.rec_type != "conversion" and not (is_page and "html" in payload.lower()):
            return
        # Most crawlers keep redirects and error pages, unlike Common Crawl's.
        if record.http_headers and _ERROR.match(record.http_headers.statusline):
            return
        content = _read_body(record)
    except Exception as error:  # Any, such as AttributeError for a header without WARC-Target-URI (warcio 1.8).
        yield Problem(where, f"not a whole WARC record: {ascii(str(error))[1:-1]:.120}")
        return
    if len(content) > MAX_PAGE_BYTES:
        yield Problem(where, f"is longer than {MAX_PAGE_BYTES:,} bytes")
        return
    metadata = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
    metadata |= {HTML: True} if is_page else {}
    name = headers.get_header("WARC-Record-ID") or where
    yield Document(text=decode_page(content, sent or ""), id=name.strip("<>"), metadata=metadata)


def _read_body(record: Any) -> bytes:
    """Return at most ``MAX_PAGE_BYTES + 1`` bytes of a body, without chunks and content encoding.

    Raises:
        OSError: The body ends early, for which warcio does not raise, or cannot be decompressed.
        zlib.error: The same, for gzip and deflate.
    """
    content, http, encoding = bytes(record.raw_stream.read()), record.http_headers, ""
    if http is not None:
        encoding = http.get_header("Content-Encoding", "").strip().lower()
        if http.get_header("Transfer-Encoding", "").strip().lower() == "chunked":
            content = _join_chunks(content)
    # Some crawlers decompress the body and keep the header: then it begins with a tag, perhaps after a byte order mark.
    if content[:_PAGE_HEAD].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return content[: MAX_PAGE_BYTES + 1]
    if content.startswith(_GZIP):
        return _inflate(content, _GZIP_WBITS)
    if encoding == "deflate":
        with suppress(zlib.error):
            return _inflate(content, zlib.MAX_WBITS)
        return _inflate(content, -zlib.MAX_WBITS)  # Some servers omit zlib's header.
    if encoding in _CODECS:
        import pyarrow as pa

        with pa.CompressedInputStream(pa.BufferReader(content), _CODECS[encoding]) as stream:
            content = bytes(stream.read(MAX_PAGE_BYTES + 1))
    return content


def _inflate(content: bytes, wbits: int) -> bytes:
    # pyarrow would refuse bytes after the end, which browsers ignore.
    decoder = zlib.decompressobj(wbits)
    page = decoder.decompress(content, MAX_PAGE_BYTES + 1)
    if not decoder.eof and len(page) <= MAX_PAGE_BYTES:
        raise OSError("Truncated compressed stream")
    return page


def _join_chunks(body: bytes) -> bytes:
    """Return a body without the sizes of its chunks; as it is if a crawler has joined them, and kept the header.

    Raises:
        OSError: The last chunk is missing.
    """
    parts, start = list[bytes](), 0
    while (head := _CHUNK.match(body, start)) and (size := int(head[1], 16)):
        parts.append(body[head.end() : head.end() + size])
        start = head.end() + size + len(b"\r\n")
    # A page may begin with a number: without a line end after its bytes, it was no size.
    if head is None and (parts[1:] or (parts and b"\r\n".startswith(body[start - 2 : start]))):
        raise OSError("its body ends before the last chunk")
    return b"".join(parts) if head else body


def decode_page(content: bytes, content_type: str = "") -> str:
    """Return the text of a page: as UTF-8 if valid, else by the charset of the HTTP header or page, else detected."""
    from trafilatura.utils import decode_file, handle_compressed_file

    content = handle_compressed_file(content)
    found = _CHARSET.findall(content_type) + _PAGE_CHARSET.findall(content[:_PAGE_HEAD].decode("latin-1"))
    declared = [name.lower().removeprefix("x-") for name in found]
    # UTF-8 first: servers declare a default for such pages, in which few bytes are invalid. But ISO-2022-JP is in
    # ASCII, with escapes around Japanese text.
    for name in (*declared, "utf-8") if b"\x1b$" in content else ("utf-8", *declared):
        with suppress(LookupError, UnicodeError):
            codec = codecs.lookup(_BROWSER_CODECS.get(name, name)).name
            return content.decode(_BROWSER_CODECS.get(codec, codec))
    return str(decode_file(content))

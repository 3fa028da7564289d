"""WARC and WET files: containers, truncation and damaged records."""

import gzip
import io
import random
import zlib

import pyarrow as pa
import pytest
from tests.corpus.test_inputs import read

from recipes_lib.corpus.documents import HTML
from recipes_lib.corpus.inputs import READ


def write_warc(path, records, protocol="HTTP/1.0", status="200 OK"):
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        for kind, body, *types in records:
            fields = [("Content-Type", field) if isinstance(field, str) else field for field in types or ["text/html"]]
            headers = StatusAndHeaders(status, fields, protocol=protocol)
            http = headers if kind == "response" else None
            own_type = types[0] if kind == "resource" else ""
            record = writer.create_warc_record(
                f"http://x/{len(body)}", kind, io.BytesIO(body), http_headers=http, warc_content_type=own_type
            )
            writer.write_record(record)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.wet.gz"])
def test_warc_and_wet_records_are_read(tmp_path, name):
    kind = "conversion" if "wet" in name else "response"
    bodies = ["<html>ä</html>".encode(), "<p>naïve café, déjà vu, à la carte</p>".encode("latin-1")]
    write_warc(tmp_path / name, [("warcinfo", b"x"), *((kind, body) for body in bodies)])
    documents, _, _ = read({"name": str(tmp_path / name)})
    assert [d.metadata.get(HTML, False) for d in documents] == [kind == "response"] * 2
    assert documents[0].text == "<html>ä</html>"
    assert "caf" in documents[1].text
    assert documents[0].metadata["url"] == f"http://x/{len(bodies[0])}"
    assert len({d.id for d in documents}) == 2


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize(
    ("status", "is_page"), [("203 Modified", True), ("301 Moved", False), ("404 Not Found", False), ("503 Busy", False)]
)
def test_redirects_and_error_pages_are_left_out(tmp_path, protocol, status, is_page):
    write_warc(tmp_path / "a.warc", [("response", b"<p>one</p>")], protocol, status)
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>one</p>"] * is_page


def test_id_of_a_page_is_that_of_its_record_or_its_place(tmp_path):
    from warcio.archiveiterator import ArchiveIterator

    path = tmp_path / "a.warc"
    write_warc(path, [("response", b"<p>one</p>"), ("response", b"<p>two</p>")])
    with path.open("rb") as file:
        ids = [record.rec_headers.get_header("WARC-Record-ID").strip("<>") for record in ArchiveIterator(file)]
    assert [document.id for document in read({"name": str(path)})[0]] == ids
    path.write_bytes(path.read_bytes().replace(b"WARC-Record-ID", b"X-Record-Number"))
    assert [document.id for document in read({"name": str(path)})[0]] == ["a/a.warc:1", "a/a.warc:2"]


@pytest.mark.parametrize(
    ("charset", "codec", "text"),
    [
        ("windows-1252", "cp1252", "It’s a “quote” – for €5."),
        ("ISO-8859-1", "cp1252", "It’s a “quote” – for €5."),
        ('"iso-8859-2"', "iso8859-2", "Zażółć gęślą jaźń nad Wisłą."),
        ("Windows-1254", "cp1254", "İstanbul, Türkiye'nin en kalabalık şehridir."),
        ("iso-8859-1", "utf-8", "Zażółć gęślą jaźń"),
        ("gb2312", "gbk", "朱镕基在北京出生，后来到上海工作，人口超过两千万。"),
        ("iso-8859-9", "cp1254", "“Işığı söndür”, çünkü şimdi güneş doğuyor."),
        ("windows-874", "cp874", "สวัสดีชาวโลก"),
        ("ISO-8859-8-I", "iso8859-8", "ירושלים היא עיר הבירה"),
        ("x-cp1251", "cp1251", "Привет мир это текст"),
        ("iso-2022-jp", "iso2022_jp", "東京は日本の首都です。"),
        ("us-ascii", "cp1252", "L’été, “où l’être” préféré."),
        ("no-charset", "cp1251", "Москва является столицей России, город федерального значения."),
        ("idna", "cp1251", "Москва является столицей России, город федерального значения."),
    ],
)
def test_page_is_decoded_by_the_charset_of_its_header(tmp_path, charset, codec, text):
    """Unless it is UTF-8, or invalid in this charset; browsers read Latin-1 as Windows-1252."""
    body = f"<html><p>{text}</p></html>"
    write_warc(tmp_path / "a.warc", [("response", body.encode(codec), f"text/html; charset={charset}")])
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == [body]


@pytest.mark.parametrize(
    ("head", "codec", "text"),
    [
        ('<meta charset="iso-8859-9">', "cp1254", "Işığı söndür, çünkü şimdi güneş doğuyor."),
        ('<META http-equiv="Content-Type" content="text/html; charset=x-sjis">', "cp932", "これは①番目の文章です。"),
        ("<?xml version='1.0' encoding='iso-8859-2'?>", "iso8859-2", "Zażółć gęślą jaźń, bo właśnie tak."),
        ('<script charset="cp1251"></script><meta charset="latin1">', "cp1252", "L’été où l’être préféré."),
        ('<meta charset="utf-16">', "cp1251", "Москва является столицей России, город федерального значения."),
    ],
)
def test_page_is_decoded_by_the_charset_that_it_states(tmp_path, head, codec, text):
    """Also a long one, of which a detector reads samples; what is stated as UTF-16 in ASCII is not UTF-16."""
    body = f"{head}<html>{f'<p>{text}</p>' * 300}</html>"
    write_warc(tmp_path / "a.warc", [("response", body.encode(codec))])
    (tmp_path / "b.html").write_bytes(body.encode(codec))
    documents, _, _ = read({"name": str(tmp_path)})
    assert [document.text for document in documents] == [body, body]


_ENCODE = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": lambda body: pa.compress(body, codec="brotli", asbytes=True),
    "zstd": lambda body: pa.compress(body, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("spell", [str.lower, str.title])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("encoding", _ENCODE)
def test_body_is_read_without_chunks_and_content_encoding(tmp_path, encoding, is_chunked, spell):
    """Names of encodings are case-insensitive (RFC 9110, 8.4.1; RFC 9112, 7). Some crawlers decode, and keep them."""
    page, fields = b"<p>" + bytes(range(32, 127)) * 9, [("Content-Encoding", spell(encoding))]
    bodies = [_ENCODE[encoding](page), page]
    if is_chunked:
        fields.append(("Transfer-Encoding", spell("chunked")))
        chunks = [[body[at : at + 50] for at in range(0, len(body), 50)] + [b""] for body in bodies]
        bodies = [b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in body) for body in chunks]
    write_warc(tmp_path / "a.warc", [("response", body, "text/html", *fields) for body in bodies])
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == [page.decode()] * 2
    assert not ledger.tallies[READ].removed


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_compressed_body_that_ends_early_is_counted(tmp_path, encoding, is_chunked):
    body, fields = _ENCODE[encoding](bytes(range(256)) * 9)[:-3], [("Content-Encoding", encoding)]
    if is_chunked:
        fields.append(("Transfer-Encoding", "chunked"))
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    write_warc(tmp_path / "a.warc", [("response", body, *fields), ("response", b"<p>two</p>")])
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>two</p>"]
    assert ledger.notes == ["a/a.warc:1: not a whole WARC record: Truncated compressed stream"]


def test_bytes_after_a_gzip_body_are_ignored(tmp_path):
    """As browsers do; some servers and crawlers append line ends or zeros."""
    bodies = [gzip.compress(b"<p>one</p>") + end for end in (b"\r\n", bytes(8))]
    write_warc(tmp_path / "a.warc", [("response", body, ("Content-Encoding", "gzip")) for body in bodies])
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>one</p>"] * 2
    assert not ledger.tallies[READ].removed


def test_deflate_body_without_header_is_read(tmp_path):
    write_warc(tmp_path / "a.warc", [("response", zlib.compress(b"<p>one</p>")[2:-4], ("Content-Encoding", "deflate"))])
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>one</p>"]


def test_page_without_chunks_may_begin_with_a_number(tmp_path):
    """Some crawlers join the chunks, and keep the header."""
    write_warc(tmp_path / "a.warc", [("response", b"10\r\nDowning Street, London", ("Transfer-Encoding", "chunked"))])
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["10\r\nDowning Street, London"]


@pytest.mark.parametrize("end", [b"5\r\nthree\r\n", b"5\r\nth"])
def test_body_without_its_last_chunk_is_counted(tmp_path, end):
    body = b"3\r\n<p>\r\n4;name=value\r\none \r\n" + end
    bodies = [body, f"{body.decode()[: -len(end)]}0\r\n\r\n".encode(), b"<p>two</p>"]
    write_warc(tmp_path / "a.warc", [("response", body, ("Transfer-Encoding", "chunked")) for body in bodies])
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>one ", "<p>two</p>"]
    assert ledger.notes == ["a/a.warc:1: not a whole WARC record: its body ends before the last chunk"]


def test_record_at_the_end_of_a_truncated_file_is_named_so(tmp_path):
    path = tmp_path / "a.warc"
    write_warc(path, [("response", b"<p>one</p>"), ("response", b"<p>" + b"two " * 99)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    documents, ledger, _ = read({"name": str(path)})
    assert [document.text for document in documents] == ["<p>one</p>"]
    num_bytes = len(whole[whole.rindex(b"HTTP/1.0") :].rstrip(b"\r\n"))
    # Two line ends follow a record.
    found = f"the file ends after {num_bytes - 50 + 4} of its {num_bytes} bytes"
    assert ledger.notes == [f"a/a.warc:2: not a whole WARC record: {found}"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_size_of_a_decompressed_body_is_limited(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr("recipes_lib.corpus.web_archive.MAX_PAGE_BYTES", 1000)
    fields = ("Content-Encoding", encoding)
    bodies = [_ENCODE[encoding](b"<" * size) for size in (1000, 1001)]
    write_warc(tmp_path / "a.warc", [("response", body, fields) for body in bodies])
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [len(document.text) for document in documents] == [1000]
    assert ledger.notes == ["a/a.warc:2: is longer than 1,000 bytes"]


@pytest.mark.parametrize("kind", ["response", "resource"])
def test_record_that_is_no_page_is_no_document(tmp_path, kind):
    """Common Crawl's records identify their type; those of wget and browsers have only that of the server.

    Those of files, such as warcit's, have a type of their own.
    """
    types = ["image/png", "text/html; charset=utf-8", "application/javascript", "Application/XHTML+xml", "text/plain"]
    write_warc(tmp_path / "a.warc", [(kind, content.encode(), content) for content in types])
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == [types[1], types[3]]


def test_truncated_warc_file_is_counted(tmp_path):
    write_warc(tmp_path / "a.warc.gz", [("response", b"<p>one</p>" * 500), ("response", b"<p>two</p>" * 500)])
    data = (tmp_path / "a.warc.gz").read_bytes()
    (tmp_path / "b.warc").write_bytes(gzip.decompress(data)[:3000] + b"garbage")
    (tmp_path / "c.warc").write_bytes(b"this is no archive at all")
    (tmp_path / "d.warc.gz").write_bytes(data[: len(data) // 3])
    (tmp_path / "e.warc").write_bytes(b"")
    documents, ledger, _ = read({"name": str(tmp_path), "label": "crawl"})
    assert [document.text for document in documents] == ["<p>one</p>" * 500, "<p>two</p>" * 500]
    assert ledger.tallies[READ].removed == {"cannot be read": 4}
    assert [note.partition(": ")[0] for note in ledger.notes] == [
        f"crawl/{name}" for name in ("b.warc:1", "c.warc:1", "d.warc.gz:1", "e.warc")
    ]


def test_compression_is_detected_by_content_or_by_name(tmp_path):
    write_warc(tmp_path / "a.warc.gz", [("response", b"<p>one</p>"), ("response", b"<p>two</p>")])
    data = (tmp_path / "a.warc.gz").read_bytes()
    (tmp_path / "b.warc").write_bytes(data)
    (tmp_path / "c.warc.gz").write_bytes(gzip.decompress(data))
    (tmp_path / "d.WARC.GZ").write_bytes(b"xx\x1f\x8b\x08" + data[5:])  # Not where a member begins.
    documents, ledger, _ = read({"name": str(tmp_path)})
    assert [document.text for document in documents] == ["<p>one</p>", "<p>two</p>"] * 3 + ["<p>two</p>"]
    assert ledger.tallies[READ].removed == {"cannot be read": 1}


def test_file_that_ends_with_its_last_record_is_whole(tmp_path):
    write_warc(tmp_path / "a.warc", [("response", b"<p>one</p>")])
    (tmp_path / "a.warc").write_bytes((tmp_path / "a.warc").read_bytes().rstrip(b"\r\n"))
    documents, ledger, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents] == ["<p>one</p>"]
    assert not ledger.tallies[READ].removed


@pytest.mark.parametrize("damage", [b"garbage", b"\x1f\x8b\x08", b"\nWARC/1.0\r\n"])
@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_damaged_warc_record_loses_no_other(tmp_path, name, damage):
    random.seed(0)
    bodies = [b"<p>%d %s</p>" % (number, random.randbytes(2000).hex().encode()) for number in range(6)]
    starts, whole = [], b""
    for body in bodies:
        write_warc(tmp_path / name, [("response", body)])
        starts.append(len(whole))
        whole += (tmp_path / name).read_bytes()
    for at in (starts[2], starts[2] + 700):
        (tmp_path / name).write_bytes(whole[:at] + damage * 9 + whole[at + 9 * len(damage) :])
        documents, ledger, _ = read({"name": str(tmp_path / name)})
        texts = [document.text.encode() for document in documents]
        # Damage inside an uncompressed payload cannot be detected.
        assert [text for text in texts if text in bodies] == bodies[:2] + bodies[3:], (at, ledger.notes)
        assert len(texts) == 6 or ledger.tallies[READ].removed["cannot be read"] >= 1


@pytest.mark.parametrize("container", ["plain", "a member a record", "one member"])
@pytest.mark.parametrize("block", [64, 1 << 16])
def test_wrong_content_length_loses_no_neighbour(tmp_path, monkeypatch, container, block):
    monkeypatch.setattr("recipes_lib.corpus.web_archive._WARC_BLOCK", block)
    bodies = [b"one", b"two\n" * 5, b"three"]
    records = []
    for body in bodies:
        write_warc(tmp_path / "r.warc", [("conversion", body)])
        records.append((tmp_path / "r.warc").read_bytes())
    stated, path = b"Content-Length: 20", tmp_path / ("a.wet" if container == "plain" else "a.wet.gz")
    assert stated in records[1]
    # 19 of 20 bytes are valid: only the final newline is missing.
    for length in [*range(19), *range(26, 60), 300, 10**6, 10**9, 10**30, "", "x", "-1"]:
        damaged = records[1].replace(stated, f"Content-Length: {length}".encode())
        parts = [records[0], damaged, records[2]]
        members = {"plain": parts, "one member": [gzip.compress(b"".join(parts))]}
        path.write_bytes(b"".join(members.get(container) or map(gzip.compress, parts)))
        documents, ledger, _ = read({"name": str(path)})
        assert [document.text for document in documents] == ["one", "three"], length
        assert ledger.tallies[READ].removed == {"cannot be read": 1}, length
        assert ledger.notes[0].startswith("a/a.wet"), length


@pytest.mark.parametrize("cut", range(1, 400, 7))
def test_truncated_gzip_member_is_one_damaged_record(tmp_path, cut):
    members = []
    for body in (b"one", b"two", b"three"):
        write_warc(tmp_path / "a.wet.gz", [("conversion", body)])
        members.append((tmp_path / "a.wet.gz").read_bytes())
    members[2] = members[2][: min(cut, len(members[2]) - 1)]
    (tmp_path / "a.wet.gz").write_bytes(b"".join(members))
    documents, ledger, _ = read({"name": str(tmp_path / "a.wet.gz")})
    # The data of the last member can be complete while its checksum is missing.
    assert [document.text for document in documents] in (["one", "two"], ["one", "two", "three"])
    assert ledger.tallies[READ].removed == {"cannot be read": 1}


@pytest.mark.parametrize("header", [b"WARC-Target-URI", b"WARC-Type", b"Content-Type", b"HTTP/1.0"])
def test_damaged_warc_header_loses_no_other_record(tmp_path, header):
    page = b"<p>one</p>" * 10_000  # The next record is more than a block away.
    write_warc(tmp_path / "a.warc", [("response", page)])
    whole = (tmp_path / "a.warc").read_bytes()
    (tmp_path / "a.warc").write_bytes(whole + whole.replace(header, b"x" * len(header)) + whole)
    documents, _, _ = read({"name": str(tmp_path / "a.warc")})
    assert [document.text for document in documents[:: len(documents) - 1]] == [page.decode()] * 2


def test_warc_syntax_in_payload_is_not_a_record(tmp_path):
    page = b"A record:\r\n\r\nWARC/1.0\r\nWARC-Type: response\r\nContent-Length: 3\r\n\r\nabc\r\n\r\nends"
    write_warc(tmp_path / "a.wet", [("conversion", page), ("conversion", b"two")])
    documents, ledger, _ = read({"name": str(tmp_path / "a.wet")})
    assert [document.text.encode() for document in documents] == [page, b"two"]
    assert not ledger.tallies[READ].removed

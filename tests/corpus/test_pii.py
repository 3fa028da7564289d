"""Personal data in texts and whole corpora: masked, dropped or kept."""

import json
import random
import re
from collections import Counter

import pytest
from datatrove.data import Document
from tests.corpus.texts import read_corpus

from recipes_lib.config.corpus_keys import PII_KINDS, CorpusConfig
from recipes_lib.config.values import SECRET, SECRET_HINTS
from recipes_lib.corpus.cleaning import make_corpus
from recipes_lib.corpus.documents import SOURCE
from recipes_lib.corpus.pii import PII, is_card, is_iban, is_luhn, mask

FOUND = [
    ("email", "ada.lovelace+x@mail.example.co.uk"),
    ("email", "a@b.co"),
    ("email", "sean.o'brien@b.co"),
    ("email", "a@2x.co"),
    ("email", "jörg.müller@bäckerei-müller.de"),
    ("email", "анна@почта.рф"),
    ("email", "info@example.xn--p1ai"),
    ("phone", "+49 30 901820"),
    ("phone", "+1 (212) 555-0123"),
    ("phone", "+4915100000004"),
    ("phone", "+353 861 234 567 890"),
    ("phone", "(212) 555-0123"),
    ("phone", "212-555-0123"),
    ("phone", "212.555.0123"),
    ("ip", "8.8.8.8"),
    ("ip", "2001:4860:4860::8888"),
    ("card", "4111 1111 1111 1111"),
    ("card", "4111-1111-1111-1111"),
    ("card", "378282246310005"),
    ("card", "3782 822463 10005"),
    ("card", "4222 2222 2222 2"),
    ("card", "5555555555554444"),
    ("iban", "GB82WEST12345698765432"),
    ("iban", "DE89 3704 0044 0532 0130 00"),
    ("iban", "NO93 8601 1117 947"),
    ("iban", "UA21 3223 1300 0002 6007 2335 6600 1"),
    ("ssn", "078-05-1120"),
    ("private_key", "-----BEGIN RSA PRIVATE KEY-----\nMIIB+/=\nabc\n-----END RSA PRIVATE KEY-----"),
    ("private_key", "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC,F1\n\nMIIB\n-----END RSA PRIVATE KEY-----"),
    ("api_token", "hf_" + "abcdefghij" * 3),
    ("api_token", "AKIA" + "ABCDEFGH12345678"),
    ("api_token", "?key=AbCd12%2F+z="),
]
LEFT = [
    *(
        "10.0.0.1",
        "192.168.1.1",
        "127.0.0.1",
        "999.1.1.1",
        "1.2.3.4.5",
        "v8.8.8.8",
        "Version 8.2.4.44",
        "System.Web, Version=4.0.0.0, Culture=neutral",
        '<package Version="6.0.0.1" />',
        '[assembly: AssemblyFileVersion("1.2.3.4")]',
        "FileVersion: 5.1.2.3",
        'ObjectIdentifier("2.5.29.17")',
        "Section 3.4.1.2 of RFC 5849",
        "rfc7692#section-7.2.3.1",
        "std::vector",
        "12:30:45",
    ),
    *("4111 1111 1111 1112", "1234567890123456", "0000 0000 0000 0000", "3.14159265358979"),
    "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    *("GB82WEST12345698765433", "DE89370400440532013001", "XX82WEST12345698765432", "AB12"),
    *("666-12-3456", "000-12-3456", "900-12-3456", "123-00-4567", "123-45-0000", "1078-05-1120"),
    *("@home", "a@b", "user@localhost", "112-555-0123", "212-155-0123", "+1 2", "2024-11-23", "call 911"),
    *("-----BEGIN CERTIFICATE-----", "hf_short", "x = a.b.c.d", "1,234,567", "$48/2=<<48/2=24>>24"),
    *("DFARS 252.227-7013 (c)", "class='sk-toggleable__label-arrow'"),
    *("logo@2x.png", "a/b-1@1.5x.webp"),
    *("`@torch.compile`", "'@types.node'", "{@code a.b}", "Decimal('+35236450.6')", "+000000120", 'href="a?key=%s"'),
]


AROUND = [
    *("{}", "see {}.", "({}),", "é {} AND more", "\n{}\n"),
    *("电话{}谢谢", "주소{}으로", "x='{}',", "`{}`", "Connection {}"),
]


@pytest.mark.parametrize(("kind", "text"), FOUND)
def test_pii_is_masked_without_context(kind, text):
    for around in AROUND:
        found = Counter()
        assert mask(around.format(text), PII_KINDS, found) == around.format(f"<{kind.upper()}>")
        assert found == {kind: 1}, around


def test_text_that_is_not_pii_is_kept():
    for text in LEFT:
        found = Counter()
        assert mask(f"see {text}, please", PII_KINDS, found) == f"see {text}, please"
        assert not found, text


def test_phone_number_before_other_digits_is_masked():
    assert mask("+353 861 234 567 890 212 555", ["phone"], Counter()) == "<PHONE> 212 555"


@pytest.mark.parametrize("prefix", ["1-", "1.", "tel:1-"])
def test_north_american_number_after_the_country_code_is_masked(prefix):
    for text in ("415-555-2671", "(415) 555-2671", "415.555.2671"):
        assert mask(f"{prefix}{text}", PII_KINDS, Counter()) == f"{prefix}<PHONE>"
    for text in ("3-1-415-555-2671", "v1.415.555.2671", "11-415-555-2671"):
        assert mask(text, PII_KINDS, Counter()) == text


def luhn_reference(digits):
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 else 1)
        total += value // 10 + value % 10
    return total % 10 == 0


def test_ibans_of_recent_members_of_the_registry_are_masked():
    # The registry's own examples (SWIFT IBAN registry).
    texts = (
        "BI4210000100010000332045181 DJ2100010000000154000100186 EG380019000500000000263180002 FK88SC123456789012 "
        "HN88CABF00000000000250005469 IQ98NBIQ850123456789012 LC55HEMM000100010012001200023015 "
        "LY83002048000020100120361 MN121234123456789123 NI45BAPR00000013000003558124 OM810180000001299123456 "
        "RU0304452522540817810538091310419 SC18SSCB11010000000000001497USD SD2129010501234001 "
        "SO211000001001000100141 ST23000100010051845310146 SV62CENR00000000000000700025 "
        "UA213223130000026007233566001 VA59001123000012345678 YE15CBYE0001018861234567891234"
    )
    assert [text for text in texts.split() if mask(text, PII_KINDS, Counter()) != "<IBAN>"] == []


def test_luhn_and_iban_check_digits():
    random_ = random.Random(0)
    for _ in range(500):
        digits = str(random_.randrange(10**12, 10**19))
        assert is_luhn(digits) == luhn_reference(digits)
    iban = "GB82WEST12345698765432"
    assert is_iban(iban)
    # Every single-digit error must be detected.
    for at in range(8, len(iban)):
        assert not is_iban(iban[:at] + str((int(iban[at]) + 1) % 10) + iban[at + 1 :])
    assert not is_iban("GB88WEST1234569876543")
    assert not is_card("4" * 16)
    assert is_luhn("9000000000000001")
    assert not is_card("9000000000000001")
    assert not is_card("4111111111111111"[:-1])


def test_pii_kinds_are_selectable():
    document = Document(text="a@b.co and 8.8.8.8", id="1")
    assert PII(["ip"], drops=False).apply(document, Counter()) is None
    assert document.text == "a@b.co and <IP>"


def test_pii_drops_document():
    document = Document(text="a@b.co and 8.8.8.8", id="1")
    assert PII(None, drops=True).apply(document, Counter()) == "email and ip"
    assert PII(None, drops=True).apply(Document(text="nothing", id="1"), Counter()) is None


def test_metadata_is_replaced_only_if_it_has_pii():
    document = Document(text="a@b.co", id="1", metadata=(metadata := {"year": 2025, SOURCE: "c@d.co"}))
    PII(None, drops=False).apply(document, Counter())
    assert document.metadata is metadata
    document.metadata["source"] = "a@b.co"
    PII(None, drops=False).apply(document, Counter())
    assert document.metadata == {"year": 2025, "source": "<EMAIL>", SOURCE: "c@d.co"}


def test_masked_pii_is_absent_from_corpus(tmp_path):
    mail, key, end = "ada@example.org", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    function = {"name": "s", "arguments": {"to": mail, "more": [mail]}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    rows = {
        "chat": [
            {"messages": [{"role": "user", "content": f"write to {mail}"}, call], "author": mail, "id": f"1 {mail}"},
            {"messages": [{"role": "user", "content": key}, {"role": "assistant", "content": f"{end} {mail}"}]},
            {"prompt": f"a {mail}", "chosen": f"b {mail}", "rejected": f"c {mail}"},
        ],
        "text": [{"text": f"by {mail}", "author": mail, "meta": {"x": [mail]}, "id": mail}, {"text": "none"}],
    }
    for kind, of_kind in rows.items():
        for number, row in enumerate(of_kind):
            (tmp_path / f"{kind}{number}.jsonl").write_text(json.dumps(row) + "\n")
        for mode in ("apply", "annotate"):
            sources = [{"name": str(path), "kind": kind} for path in sorted(tmp_path.glob(f"{kind}?.jsonl"))]
            out = tmp_path / f"{kind}-{mode}"
            config = CorpusConfig(sources=sources, output_dir=str(out), pii=mode, fix_text="off", workers=1)
            manifest = make_corpus(config)
            written = json.dumps(read_corpus(out), ensure_ascii=False)
            num_found = json.dumps(of_kind).count(mail)
            assert manifest["steps"]["pii"]["found"]["email"] == num_found
            assert written.count(mail) == (num_found if mode == "annotate" else 0)
            assert written.count("<EMAIL>") == (0 if mode == "annotate" else num_found)
            assert "\ue000" not in written
    chats = read_corpus(tmp_path / "chat-apply")
    assert [message["content"] for message in chats[1]["messages"]] == ["<PRIVATE_KEY>", f"{end} <EMAIL>"]


@pytest.mark.parametrize("mode", ["apply", "annotate"])
def test_report_samples_contain_no_pii(tmp_path, mode):
    """Samples of documents that a step before `pii` removed must be masked as well."""
    mail, long = "ada@example.org", "words of a long text without any end " * 60
    texts = [f"short {mail}", f"{long}{mail}", f"{long}{mail} again", f"{long[:1490]} {mail}", f"{long} other words"]
    rows = [{"text": text, "id": f"{mail} {at}"} for at, text in enumerate([*texts, texts[1]])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": str(tmp_path / "rows.jsonl"), "kind": "web"}
    off = dict.fromkeys(("gopher_repetition", "c4_quality", "fineweb_quality"), "off")
    changes = {"web": {**off, "gopher_quality": {"min_stop_words": 0}}}
    out = tmp_path / "out"
    lines = {"repeated_lines": "apply", "repeated_lines_min_documents": 2, "near_duplicates_threshold": 0.5}
    keys = {"sources": [source], "output_dir": str(out), "quality_thresholds": changes, "workers": 1, **lines}
    make_corpus(CorpusConfig(**keys, pii=mode))
    quoted = [out / "report.html", *(out / ".work").rglob("*.json")]
    assert not [path for path in quoted if "ada@ex" in path.read_text()]
    samples = json.loads((out / ".work" / "samples.json").read_text())
    assert {"kept", "quality: gopher_quality gopher_short_doc"} <= samples.keys()
    assert "&lt;EMAIL&gt;" in (out / "report.html").read_text()
    assert "@" not in json.dumps(samples)


def test_mask_is_idempotent():
    text = " ".join(text for _, text in FOUND)
    once = mask(text, PII_KINDS, Counter())
    assert mask(once, PII_KINDS, Counter()) == once


@pytest.mark.parametrize(
    "piece", ["a", "1", "a.", "1 ", "A1", "-", "+1 ", "a@", "2:", "2000:", "(1", "1.1.", "://a", "sk-"]
)
def test_mask_takes_linear_time(piece):
    # In quadratic time this would take a minute.
    mask(piece * (100_000 // len(piece)), PII_KINDS, Counter())


def test_secret_hints_cover_secret_pattern():
    tokens = [
        *("hf_" + "a" * 30, "api_org_" + "a" * 30, *(f"gh{kind}_" + "a" * 36 for kind in "pousr")),
        *("github_pat_" + "a" * 30, "glpat-" + "a" * 20, "AKIA" + "A" * 16, "ASIA" + "A" * 16, "AIza" + "a" * 35),
        *("ya29." + "a" * 30, "sk-" + "a" * 40, "sk_live_" + "a" * 20, "rk_test_" + "a" * 20, "wandb_v1_" + "a" * 30),
        *("nvapi-" + "a" * 30, "gsk_" + "a" * 30, "r8_" + "a" * 36, "pypi-" + "a" * 40, "xoxb-" + "1" * 20),
        *("eyJ" + "a" * 20 + ".eyJ" + "b" * 20 + "." + "c" * 20, "-----BEGIN PRIVATE KEY-----"),
        *("https://me:secret@host/x", "/x?access_token=abcdef", "/x?sig=abcdef"),
    ]
    for token in tokens:
        assert SECRET.search(token), token
        assert any(hint in token for hint in SECRET_HINTS), token
    alternatives = re.sub(r"\(\?[^)]*\)|\[[^]]*\]", "", SECRET.pattern).count("|")
    assert len(tokens) >= alternatives

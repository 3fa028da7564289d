"""``recipes classifier``: training, evaluation, and filtering of a corpus by ``recipes clean``."""

from __future__ import annotations

import json

import pytest
from tests.corpus.test_text_classifier import FASTTEXT, plant
from tests.corpus.texts import ENGLISH, GERMAN, write_rows


def test_trained_classifier_filters_corpus(recipes, tmp_path) -> None:
    good, bad = (write_rows(tmp_path / f"{label} pages.jsonl", plant(label, 150, 0)) for label in ("good", "bad"))
    folder = tmp_path / "my classifier"
    output = recipes("classifier", "train", folder, f"good={good}", f"bad={bad}", "--held_out", 0.2)
    assert "accuracy 100.0%" in output
    assert "good: area under the ROC curve 1.000" in output
    assert f"classifier_path: {folder}, classifier_label: good" in output
    assert json.loads((folder / "classifier.json").read_text())["evaluation"]["accuracy"] == 1
    unseen = [plant(label, 50, 5) for label in ("good", "bad")]
    mixed = write_rows(tmp_path / "mixed.jsonl", [text for those in unseen for text in those])
    keys = {"classifier_path": str(folder), "classifier_label": "good", "toxicity_classifier_path": str(folder)}
    keys |= {"toxicity_classifier_label": "bad", "sources": [{"name": str(mixed)}], "workers": 1}
    (tmp_path / "corpus.yaml").write_text(json.dumps(keys | {"classifier": "annotate", "toxicity": "apply"}))
    flags = ["--config", tmp_path / "corpus.yaml"]
    recipes("clean", *flags, "--classifier=apply", "--toxicity=off", f"--output_dir={tmp_path / 'by quality'}")
    recipes("clean", *flags, f"--output_dir={tmp_path / 'by toxicity'}")
    for name, step, reason in (
        ("by quality", "classifier", "not good"),
        ("by toxicity", "toxicity", "classifier: bad"),
    ):
        manifest = json.loads((tmp_path / name / "corpus.json").read_text())
        assert manifest["steps"][step]["removed"] == {reason: 50}
        assert manifest["documents"] == 50
        assert reason in (tmp_path / name / "report.html").read_text()
    steps = json.loads((tmp_path / "by toxicity" / "corpus.json").read_text())["steps"]
    assert steps["classifier"]["removed"] == {}
    assert steps["classifier"]["found"] == {"not good": 50}


def test_eval_accepts_existing_fasttext_model(recipes, tmp_path) -> None:
    sources = [
        f"{label}={write_rows(tmp_path / label / 'texts.jsonl', [text])}"
        for label, text in (("en", ENGLISH), ("de", GERMAN))
        if not (tmp_path / label).mkdir()
    ]
    assert "accuracy 100.0%" in recipes("classifier", "eval", FASTTEXT, *sources)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "out", "good=a", "bad"], "write it as good=pages.jsonl"),
        (["train", "out", "good=a"], "there is one label, 'good'"),
        (["train", "out", "good=a", "bad=b", "--held_out", 1], "write a finite number > 0 and < 1"),
        (["train", "out", "good=no/such.jsonl", "bad=b"], "no/such.jsonl"),
        (["eval", "no/such/model", "good={rows}", "bad={rows}"], "no fastText model"),
        (["eval", FASTTEXT, "en={rows}", "english={rows}"], "english=: the model has no label 'english'"),
        (["train", "{rows}/out", "good={rows}", "bad={rows}"], "texts are held out"),
        (["train", "out", "good={blank}", "bad={rows}"], "has no text for the label good"),
    ],
)
def test_invalid_arguments_and_data_are_rejected(recipes, tmp_path, words, message) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ["one", "two"])
    blank = write_rows(tmp_path / "blank.jsonl", [" "])
    assert message in recipes("classifier", *(str(word).format(rows=rows, blank=blank) for word in words), code=2)


def test_classifier_is_trained_on_the_texts_of_chats(recipes, tmp_path) -> None:
    for label in ("good", "bad"):
        chats = [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
            for text in plant(label, 150, 0)
        ]
        (tmp_path / f"{label}.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    sources = [f"{label}={tmp_path / label}.jsonl" for label in ("good", "bad")]
    assert "accuracy 100.0%" in recipes("classifier", "train", tmp_path / "out", *sources, "--held_out", 0.2)

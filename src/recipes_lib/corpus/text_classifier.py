"""Text classifiers, linear models of hashed word n-grams or fastText's, and the steps that remove documents by them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from datatrove.data import Document

from recipes_lib.corpus.documents import hash_name
from recipes_lib.corpus.text_steps import MAX_CLASSIFIED, load_fasttext, predict_fasttext
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record, replace_record, replacing

SETTINGS_FILE: Final = "classifier.json"
WEIGHTS_FILE: Final = "weights.safetensors"
THRESHOLDS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
_BUCKETS: Final = 1 << 20
_WORDS: Final = 2
_INVERSE_REGULARIZATION: Final = 10.0
"""Of scikit-learn, ``C``: its default of 1 hardly moves weights of n-grams in rows of length 1."""
_MIN_HELD_OUT: Final = 5

Predict = Callable[[str], Mapping[str, float]]
"""Returns the probability of each label of a text."""
Texts = Mapping[str, Sequence[str]]
"""Texts by label."""
Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LinearClassifier:
    """Softmax over a linear function of a text's hashed word n-grams.

    Attributes:
        labels: The classes.
        weight: ``float32 (buckets, labels)``.
        bias: ``float32 (labels,)``.
        num_words: Words of the longest n-gram.

    Source: Weinberger et al. 2009 (feature hashing), as ``HashingVectorizer`` has it; Joulin et al. 2016 (fastText) for
    n-grams of words under a linear model.
    """

    labels: tuple[str, ...]
    weight: Array
    bias: Array
    num_words: int = _WORDS

    def predict(self, texts: Sequence[str]) -> Array:
        """Return the probabilities, ``(N, labels)``."""
        logits = np.asarray(_hash_words(texts, len(self.weight), self.num_words) @ self.weight) + self.bias
        # Softmax; without the maximum the exponential of a large logit overflows.
        weights: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def score(self, text: str) -> dict[str, float]:
        """Return the probability of each label of a text."""
        return dict(zip(self.labels, map(float, self.predict([text])[0]), strict=True))

    def save(self, folder: Path, evaluation: Mapping[str, Any]) -> None:
        """Write the classifier and its evaluation: safetensors and JSON.

        Raises:
            OSError: It cannot be written.
        """
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS_FILE) as partial:
            save_file({"weight": self.weight, "bias": self.bias}, partial)
        record = {"labels": list(self.labels), "num_words": self.num_words, "evaluation": evaluation}
        replace_record(folder / SETTINGS_FILE, record)


def _hash_words(texts: Sequence[str], num_buckets: int, num_words: int) -> Any:
    """Return the hashed n-grams of texts, sparse ``float32 (N, num_buckets)``, each row of length 1.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError as error:
        remedy = "pip install 'recipes-lib[corpus]'"
        raise ConfigError(Problem("classifier", "scikit-learn is not installed", remedy)) from error
    vectorizer = HashingVectorizer(
        n_features=num_buckets, ngram_range=(1, num_words), token_pattern=r"(?u)\b\w+\b", dtype=np.float32
    )
    return vectorizer.transform([text[:MAX_CLASSIFIED] for text in texts])


def split_held_out(texts: Texts, share: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return training and held-out texts; a text and its copies are on one side.

    Raises:
        DataError: A label has fewer than ``_MIN_HELD_OUT`` held-out texts.
    """
    parts: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for label, those in texts.items():
        for part in parts:
            part[label] = []
        for text in those:
            # By content, and by 56 bits as `hash_name` gives: copies are on one side in every run.
            parts[hash_name(text) < share * (1 << 56)][label].append(text)
    few = {label: len(those) for label, those in parts[1].items() if len(those) < _MIN_HELD_OUT}
    if few:
        problems = [
            Problem(label, f"{number} of {len(texts[label])} texts are held out", "give more texts of this label")
            for label, number in few.items()
        ]
        raise DataError(*problems)
    return parts


def train_classifier(texts: Texts) -> LinearClassifier:
    """Train by logistic regression; labels count alike, however many texts each has.

    Args:
        texts: Of two labels or more.
    """
    from sklearn.linear_model import LogisticRegression

    labels, rows = tuple(texts), [text for those in texts.values() for text in those]
    targets = np.repeat(np.arange(len(labels)), [len(those) for those in texts.values()])
    # `balanced`: a class of ten times as many texts would otherwise be the guess for every uncertain one.
    model = LogisticRegression(C=_INVERSE_REGULARIZATION, class_weight="balanced", max_iter=1000)
    model.fit(_hash_words(rows, _BUCKETS, _WORDS), targets)
    weight, bias = model.coef_, model.intercept_
    if len(labels) == 2:  # Of two classes there is only the difference.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return LinearClassifier(labels, np.ascontiguousarray(weight.T, np.float32), bias.astype(np.float32))


def evaluate_classifier(predict: Predict, texts: Texts) -> dict[str, Any]:
    """Return accuracy, and of each label area under the ROC curve, precision and recall at ``THRESHOLDS``.

    Args:
        predict: From ``load_classifier``.
        texts: By true label.
    """
    from sklearn.metrics import roc_auc_score

    rows = [(label, predict(text)) for label, those in texts.items() for text in those]
    best = [max(scores, key=lambda name: scores[name]) for _, scores in rows]
    found: dict[str, Any] = {
        "documents": {label: len(those) for label, those in texts.items()},
        "accuracy": sum(label == name for (label, _), name in zip(rows, best, strict=True)) / len(rows),
        "labels": {},
    }
    for label in texts:
        is_it = np.array([name == label for name, _ in rows])
        scores = np.array([each.get(label, 0.0) for _, each in rows])
        curve = []
        for threshold in THRESHOLDS:
            kept = scores >= threshold
            precision = float(is_it[kept].mean()) if kept.any() else None
            curve.append({"threshold": threshold, "precision": precision, "recall": float(kept[is_it].mean())})
        found["labels"][label] = {"roc_auc": float(roc_auc_score(is_it, scores)), "curve": curve}
    return found


@functools.cache
def load_classifier(path: str) -> Predict:
    """Load a classifier of ``recipes classifier train``, a folder, or of fastText, a file.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    if not Path(path).is_dir():
        return functools.partial(predict_fasttext, load_fasttext(path))
    return read_linear(Path(path)).score


def read_linear(folder: Path) -> LinearClassifier:
    """Read the folder of ``LinearClassifier.save``.

    Raises:
        ConfigError: It is none.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        record = read_record(folder / SETTINGS_FILE, {"labels": list, "num_words": int})
        tensors = load_file(folder / WEIGHTS_FILE)
        labels, weight, bias = tuple(map(str, record["labels"])), tensors["weight"], tensors["bias"]
        is_whole = weight.ndim == 2 and bias.shape == (len(labels),) == weight.shape[1:] and record["num_words"] > 0
    except (DataError, OSError, SafetensorError, KeyError) as error:
        found, is_whole = f"is no classifier: {error}", False
    else:
        found = "is no classifier: its weights are not those of its labels"
    if not is_whole:
        remedy = "name the folder that `recipes classifier train` wrote, or a file of fastText"
        raise ConfigError(Problem(str(folder), found, remedy))
    return LinearClassifier(labels, weight, bias, record["num_words"])


def verify_label(path: str, label: str) -> None:
    """Raise if a linear classifier has no such label; fastText does not list them.

    Raises:
        ConfigError: There is no such label, or the classifier cannot be read.
    """
    if Path(path).is_dir() and label not in (labels := load_classifier(path)("")):
        found = f"the classifier at {path} has no label {label!r}"
        raise ConfigError(Problem("classifier_label", found, f"write one of {', '.join(labels)}"))


class Classifier:
    """Text classifier; documents below the threshold of its label are removed."""

    name = "classifier"

    def __init__(self, path: str, label: str, threshold: float) -> None:
        """Keep documents with a probability of ``label`` of at least ``threshold`` under the model at ``path``.

        Raises:
            ConfigError: As ``verify_label``.
        """
        verify_label(path, label)
        self._path, self._label, self._threshold = path, label, threshold

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Record the score; remove documents below the threshold."""
        score = load_classifier(self._path)(document.text).get(self._label, 0.0)
        document.metadata["classifier_score"] = round(score, 4)
        return None if score >= self._threshold else f"not {self._label}"


class Toxicity:
    """Removes documents with a word of the user's lists, or that a classifier calls toxic."""

    name = "toxicity"

    def __init__(
        self,
        paths: Sequence[str],
        keep_fraction: float,
        classifier: str | None = None,
        label: str = "",
        threshold: float = 0.5,
    ) -> None:
        """Read the lists.

        Args:
            paths: Lists, a word or phrase a line.
            keep_fraction: Share of the documents with a word that is kept.
            classifier: Path of a classifier; ``None``: there is none.
            label: Its label of toxic documents.
            threshold: Probability of that label from which on a document is removed.

        Raises:
            ConfigError: As ``verify_label``.
            DataError: A list cannot be read, or none has a word.
        """
        if classifier is not None:
            verify_label(classifier, label)
        self._classifier, self._label, self._threshold = classifier, label, threshold
        self._keep_fraction = keep_fraction
        words: set[str] = set()
        for path in paths:
            try:
                words |= {line.strip().lower() for line in Path(path).read_text(encoding="utf-8").splitlines()} - {""}
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    Problem(path, f"cannot be read: {error}", "name a text file, one word a line")
                ) from error
        if paths and not words:
            raise DataError(Problem(", ".join(paths), "the word lists are empty", "write one word or phrase a line"))
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)") if words else None

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Remove a document with a word, or above the threshold, whose score is recorded."""
        match = self._pattern.search(document.text.lower()) if self._pattern else None
        if match is not None:
            found[match.group()] += 1
            if hash_name(document.id) >= self._keep_fraction * (1 << 56):
                return "word list"
        if self._classifier is None:
            return None
        score = load_classifier(self._classifier)(document.text).get(self._label, 0.0)
        document.metadata["toxicity_score"] = round(score, 4)
        return f"classifier: {self._label}" if score >= self._threshold else None

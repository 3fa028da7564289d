"""Text classifiers, linear models of hashed word n-grams or fastText, and the steps that remove documents by them."""

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
from recipes_lib.corpus.duplicates import UNSPACED
from recipes_lib.corpus.text_steps import MAX_CLASSIFIED, list_labels, load_fasttext, predict_fasttext, verify_label
from recipes_lib.errors import ConfigError, DataError, Problem, raise_problems, verify_extra
from recipes_lib.files import atomic_file, read_record, read_text, remove_unfinished_weights, replace_record

SETTINGS_FILE: Final = "classifier.json"
WEIGHTS_FILE: Final = "weights.safetensors"
THRESHOLDS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Thresholds at which a classifier is evaluated."""
_BUCKETS: Final = 1 << 20
"""Hash buckets of n-grams."""
_WORDS: Final = 2
"""Words of the longest n-gram."""
_INVERSE_REGULARIZATION: Final = 10.0
"""``C`` of scikit-learn; with the default 1, weights stay close to 0, because rows have unit length."""
_MIN_TEXTS: Final = 5
"""Texts of a label, trained on or held out, below which its evaluation is meaningless."""

Predict = Callable[[str], Mapping[str, float]]
"""Returns the probability of each label of a text."""
Texts = Mapping[str, Sequence[str]]
"""Label -> texts."""
Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LinearClassifier:
    """Softmax over a linear function of a text's hashed word n-grams.

    Attributes:
        labels: Names of the classes.
        weight: Weights, ``float32 (buckets, labels)``.
        bias: Biases, ``float32 (labels,)``.
        num_words: Words of the longest n-gram.

    Source: feature hashing, Weinberger et al. 2009, by scikit-learn's ``HashingVectorizer``; word n-grams in a linear
    model, Joulin et al. 2016 (fastText).
    """

    labels: tuple[str, ...]
    weight: Array
    bias: Array
    num_words: int = _WORDS

    def predict(self, texts: Sequence[str]) -> Array:
        """Return the probabilities of the labels, ``float32 (N, labels)``."""
        logits = np.asarray(_hash_words(texts, len(self.weight), self.num_words) @ self.weight) + self.bias
        # Softmax; subtracting the maximum keeps the exponential from overflowing.
        weights: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def score(self, text: str) -> dict[str, float]:
        """Return the probability of each label of a text."""
        return dict(zip(self.labels, map(float, self.predict([text])[0]), strict=True))

    def save(self, folder: Path, evaluation: Mapping[str, Any]) -> None:
        """Write the weights as safetensors, and the settings with the result of ``evaluate_classifier`` as JSON.

        Raises:
            OSError: The folder cannot be written.
        """
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        # A process that is killed between the files must not leave new weights under the labels of an earlier training.
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        remove_unfinished_weights(folder)
        with atomic_file(folder / WEIGHTS_FILE) as partial:
            save_file({"weight": self.weight, "bias": self.bias}, partial)
        record = {"labels": list(self.labels), "num_words": self.num_words, "evaluation": evaluation}
        replace_record(folder / SETTINGS_FILE, record)


def _hash_words(texts: Sequence[str], num_buckets: int, num_words: int) -> Any:
    """Return the counts of hashed n-grams, a sparse matrix ``float32 (N, num_buckets)`` with rows of unit L2 norm.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    verify_extra("classifier", "corpus", "sklearn")
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        n_features=num_buckets, ngram_range=(1, num_words), token_pattern=r"(?u)\b\w+\b", dtype=np.float32
    )
    return vectorizer.transform([text[:MAX_CLASSIFIED] for text in texts])


def split_held_out(texts: Texts, share: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return training and held-out texts, about a ``share`` of each label; copies of a text are in the same part.

    Raises:
        DataError: A label has fewer than ``_MIN_TEXTS`` texts in one of the parts.
    """
    parts: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for label, group in texts.items():
        for part in parts:
            part[label] = []
        for text in group:
            # By a 56-bit hash of the content, so that the split is reproducible and does not separate copies.
            parts[hash_name(text) < share * (1 << 56)][label].append(text)
    few = [
        Problem(label, f"{len(part[label])} of {len(group)} texts are {what}", "give more texts of this label")
        for label, group in texts.items()
        for part, what in zip(parts, ("trained on", "held out"), strict=True)
        if len(part[label]) < _MIN_TEXTS
    ]
    raise_problems(few, "recipes classifier")
    return parts


def train_classifier(texts: Texts) -> LinearClassifier:
    """Train a classifier by logistic regression with equal weight for every label.

    Args:
        texts: Texts of at least two labels.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    from sklearn.linear_model import LogisticRegression

    labels, rows = tuple(texts), [text for group in texts.values() for text in group]
    targets = np.repeat(np.arange(len(labels)), [len(group) for group in texts.values()])
    # `balanced`: uncertain texts would otherwise be assigned to the label with the most texts.
    model = LogisticRegression(C=_INVERSE_REGULARIZATION, class_weight="balanced", max_iter=1000)
    model.fit(_hash_words(rows, _BUCKETS, _WORDS), targets)
    weight, bias = model.coef_, model.intercept_
    if len(labels) == 2:  # scikit-learn stores one row for two classes: the logit of the second minus the first.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return LinearClassifier(labels, np.ascontiguousarray(weight.T, np.float32), bias.astype(np.float32))


def evaluate_classifier(predict: Predict, texts: Texts) -> dict[str, Any]:
    """Return the accuracy, and for each label the area under the ROC curve, and precision and recall at ``THRESHOLDS``.

    Args:
        predict: Classifier of ``load_classifier``.
        texts: Texts by true label; every label has at least one.
    """
    from sklearn.metrics import roc_auc_score

    rows = [(label, predict(text)) for label, group in texts.items() for text in group]
    # No label at all, as fastText returns for a text without known words, is a wrong prediction.
    best = [max(scores, key=lambda name: scores[name], default=None) for _, scores in rows]
    result: dict[str, Any] = {
        "documents": {label: len(group) for label, group in texts.items()},
        "accuracy": sum(label == name for (label, _), name in zip(rows, best, strict=True)) / len(rows),
        "labels": {},
    }
    for label in texts:
        is_positive = np.array([name == label for name, _ in rows])
        scores = np.array([each.get(label, 0.0) for _, each in rows])
        curve = []
        for threshold in THRESHOLDS:
            kept = scores >= threshold
            precision = float(is_positive[kept].mean()) if kept.any() else None
            curve.append({"threshold": threshold, "precision": precision, "recall": float(kept[is_positive].mean())})
        result["labels"][label] = {"roc_auc": float(roc_auc_score(is_positive, scores)), "curve": curve}
    return result


@functools.cache
def load_classifier(path: str) -> Predict:
    """Load a classifier: a folder written by ``recipes classifier train``, or a file of fastText.

    Raises:
        ConfigError: The path does not exist or is not a classifier.
    """
    if not Path(path).is_dir():
        return functools.partial(predict_fasttext, load_fasttext(path))
    return read_linear(Path(path)).score


def read_linear(folder: Path) -> LinearClassifier:
    """Read a folder of ``LinearClassifier.save``.

    Raises:
        ConfigError: The folder does not contain a valid classifier.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        record = read_record(folder / SETTINGS_FILE, {"labels": list, "num_words": int})
        tensors = load_file(folder / WEIGHTS_FILE)
        labels, weight, bias = tuple(map(str, record["labels"])), tensors["weight"], tensors["bias"]
        if weight.ndim != 2 or not bias.shape == (len(labels),) == weight.shape[1:] or record["num_words"] < 1:
            raise ValueError("its weights do not match its labels")
    except (DataError, OSError, SafetensorError, KeyError, ValueError) as error:
        remedy = "name a folder written by `recipes classifier train`, or a file of fastText"
        raise ConfigError(Problem(str(folder), f"is not a classifier: {error}", remedy)) from error
    return LinearClassifier(labels, weight, bias, record["num_words"])


def verify_classifier(key: str, path: str, label: str) -> None:
    """Verify that the classifier at ``path`` has a label, which a key or an argument names.

    Raises:
        ConfigError: It does not, or cannot be read.
    """
    verify_label(key, label, list(load_classifier(path)("")) if Path(path).is_dir() else list_labels(path))


class Classifier:
    """Removes documents whose probability of a label, such as of high quality, is below a threshold."""

    name = "classifier"

    def __init__(self, path: str, label: str, threshold: float) -> None:
        """Keep documents with a probability of at least ``threshold`` for ``label`` under the model at ``path``.

        Raises:
            ConfigError: The classifier has no such label, or cannot be read.
        """
        verify_classifier("classifier_label", path, label)
        self._path, self._label, self._threshold = path, label, threshold

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Record the score; remove documents below the threshold."""
        score = load_classifier(self._path)(document.text).get(self._label, 0.0)
        document.metadata["classifier_score"] = round(score, 4)
        return None if score >= self._threshold else f"not {self._label}"


class Toxicity:
    """Removes documents that contain a word of a list, or that a classifier predicts to be toxic."""

    name = "toxicity"

    def __init__(
        self, paths: Sequence[str], keep_fraction: float, classifier: str | None, label: str, threshold: float
    ) -> None:
        """Read the word lists.

        Args:
            paths: Paths of word lists, one word or phrase per line.
            keep_fraction: Fraction of the documents with a listed word that is kept.
            classifier: Path of a classifier; ``None`` for word lists only.
            label: Label that the classifier gives to toxic documents.
            threshold: Smallest probability of ``label`` at which a document is removed.

        Raises:
            ConfigError: The classifier has no such label; it or a word list cannot be read.
            DataError: All word lists are empty.
        """
        if classifier is not None:
            verify_classifier("toxicity_classifier_label", classifier, label)
        self._classifier, self._label, self._threshold = classifier, label, threshold
        self._keep_fraction = keep_fraction
        words: set[str] = set()
        for path in paths:
            lines = read_text(Path(path), "toxic_words", "name a text file, one word a line").splitlines()
            words |= {line.strip().lower() for line in lines} - {""}
        if paths and not words:
            raise DataError(Problem(", ".join(paths), "the word lists are empty", "write one word or phrase a line"))
        # Longest first: a regular expression takes the first alternative that matches.
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        # In scripts without spaces, every neighbour of a word is a letter, and a word has no boundaries.
        bounded = (
            re.escape(word) if UNSPACED.search(word) else rf"(?<!\w){re.escape(word)}(?!\w)" for word in longest_first
        )
        self._pattern = re.compile("|".join(bounded)) if words else None

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Remove a document with a listed word or a score at the threshold or above; record the score."""
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

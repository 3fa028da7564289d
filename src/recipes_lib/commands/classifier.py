"""``recipes classifier``: train and evaluate text classifiers for the steps ``classifier`` and ``toxicity``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import explain_write_errors


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag is wrong, the classifier cannot be read or written, or does not have a label.
        DataError: A source cannot be read, or a label has too few documents.
    """
    options = _parse(argv)
    sources = _read_labels(options.texts)
    from recipes_lib.corpus.text_classifier import (
        evaluate_classifier,
        load_classifier,
        read_linear,
        split_held_out,
        train_classifier,
        verify_classifier,
    )

    texts = {label: _read_texts(label, names) for label, names in sources.items()}
    folder: Path = options.classifier
    if options.command == "eval":
        for label in texts:
            verify_classifier(f"{label}=", str(folder), label)
        evaluation = evaluate_classifier(load_classifier(str(folder)), texts)
    else:
        train, held_out = split_held_out(texts, options.held_out)
        classifier = train_classifier(train)
        evaluation = evaluate_classifier(classifier.score, held_out)
        with explain_write_errors(folder, "name another folder"):
            classifier.save(folder, evaluation)
        read_linear(folder)
    sys.stdout.write("".join([f"{line}\n" for line in describe(evaluation)]))
    if options.command == "train":
        keys = f"classifier: apply, classifier_path: {folder}, classifier_label: {next(iter(texts))}"
        sys.stdout.write(f"written to {folder}; in recipes clean: {keys}\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("classifier")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("train", "train on some documents, evaluate on others"), ("eval", "evaluate a classifier")):
        commands.add_parser(name, help=text, command=f"classifier {name}")
    return parser.parse_args(argv)


def _read_labels(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the sources of each label, from arguments ``LABEL=DATA``.

    Raises:
        ConfigError: An argument has no label, or there are fewer than two labels.
    """
    sources: dict[str, list[str]] = {}
    for word in words:
        label, equals, name = word.partition("=")
        if not (label and equals and name):
            raise ConfigError(Problem(word, "is not LABEL=DATA", "write it as good=pages.jsonl"))
        sources.setdefault(label, []).append(name)
    if len(sources) < 2:
        found = f"there is one label, {next(iter(sources))!r}"
        raise ConfigError(Problem("recipes classifier", found, "write two or more: good=wiki.jsonl bad=crawl.jsonl"))
    return sources


def _read_texts(label: str, names: Sequence[str]) -> list[str]:
    """Return the documents of a label, truncated as the classifier truncates them; warn about those not read.

    Raises:
        DataError: A source cannot be read, or there is no document.
    """
    from recipes_lib.config.corpus_keys import CorpusConfig
    from recipes_lib.corpus.documents import Ledger
    from recipes_lib.corpus.inputs import READ, Read, open_inputs
    from recipes_lib.corpus.text_steps import MAX_CLASSIFIED

    texts: list[str] = []
    for source in open_inputs(CorpusConfig(sources=[{"name": name} for name in names])):
        ledger = Ledger([READ], 0)
        read = Read(source, ledger, raises=False)
        texts += [doc.text[:MAX_CLASSIFIED] for task in range(len(source.tasks)) for doc in read.run(None, task)]
        sys.stderr.write("".join([f"warning: not read: {note}\n" for note in ledger.notes]))
    if not texts:
        raise DataError(Problem(", ".join(names), f"has no text for the label {label}", "name other files"))
    return texts


def describe(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the evaluation as lines: accuracy, then ROC AUC and a precision-recall table per label."""
    documents = ", ".join(f"{count:,} {label}" for label, count in evaluation["documents"].items())
    lines = [f"evaluated on {documents}: accuracy {evaluation['accuracy']:.1%}"]
    for label, found in evaluation["labels"].items():
        lines.append(f"{label}: area under the ROC curve {found['roc_auc']:.3f}")
        for row in found["curve"]:
            precision = "none" if row["precision"] is None else f"{row['precision']:.1%}"
            lines.append(f"    threshold {row['threshold']:g}: precision {precision}, recall {row['recall']:.1%}")
    return lines

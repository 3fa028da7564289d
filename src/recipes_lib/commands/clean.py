"""``recipes clean``: build a clean corpus from raw text, like ``recipes/corpus.py``; and ``recipes classifier``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from recipes_lib.commands.score import load_text_scorer
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.errors import EXIT_DONE, ConfigError, DataError, Problem, verify_extra
from recipes_lib.files import explain_write_errors
from recipes_lib.processes import count_cores
from recipes_lib.quantities import format_bytes

MEGABYTES_PER_SECOND: Final = 1.7
"""Throughput of one core with all steps on web text (``benchmarks/corpus.py``); higher without a quality preset."""
DISK_SHARE: Final = 1.7
"""Bytes in ``.work`` per byte of input: documents compressed to half, a hash of 4 bytes per word (of about 6 bytes),
and the hashes of short documents. Shards are the same files under other names."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The configuration is wrong, or the extra ``corpus`` is not installed.
        DataError: A source cannot be read, or no document is left.
    """
    config = _parse(argv)
    from recipes_lib.corpus.cleaning import make_corpus

    manifest = make_corpus(config, load_text_scorer)
    if manifest is None:
        sys.stdout.write(f"submitted to {config.executor}; the last job writes {config.output_dir}/corpus.json\n")
        return
    sys.stdout.writelines(f"{line}\n" for line in describe(manifest, config.output_dir))


def _parse(argv: Sequence[str]) -> CorpusConfig:
    """Parse the configuration.

    Raises:
        ConfigError: It is invalid, or the extra ``corpus`` is not installed.
    """
    config = CorpusConfig.parse(argv)
    verify_extra("recipes clean", "corpus", "datatrove", "ftfy", "trafilatura", "warcio")
    return add_evaluated(config)


def add_evaluated(config: CorpusConfig) -> CorpusConfig:
    """Return the configuration with the datasets of the tasks in ``benchmarks_of`` added to ``benchmarks``.

    Raises:
        ConfigError: An evaluation file of ``benchmarks_of`` is invalid, or the extra ``eval`` is not installed.
    """
    if not config.benchmarks_of:
        return config
    verify_extra("benchmarks_of", "eval", "lm_eval")
    from recipes_lib.config.evaluation import read_evaluated_tasks
    from recipes_lib.evaluation.suites import list_datasets

    benchmarks = list(config.benchmarks or ())
    for path in config.benchmarks_of:
        known = [{**entry, "label": None} for entry in benchmarks]
        found = list_datasets(read_evaluated_tasks(path))
        benchmarks += [entry for entry in found if {**entry, "label": None} not in known]
    return replace(config, benchmarks=benchmarks)


def check(argv: Sequence[str]) -> int:
    """``recipes check`` for a corpus: open every source, word list and benchmark, and load every model.

    Raises:
        ConfigError: As ``main``.
        DataError: A source or benchmark cannot be read.
    """
    config = _parse(argv)
    from recipes_lib.corpus.cleaning import dry_run_steps

    sys.stdout.writelines(f"{line}\n" for line in dry_run_steps(config, load_text_scorer))
    sys.stdout.write("\nready to clean\n")
    return EXIT_DONE


def plan(argv: Sequence[str]) -> None:
    """``recipes plan`` for a corpus: hours and disk space, estimated from the size of its sources.

    Raises:
        ConfigError: As ``main``.
        DataError: A source cannot be found.
    """
    config = _parse(argv)
    from recipes_lib.corpus.inputs import count_input_bytes, open_inputs

    sizes = {source.label: count_input_bytes(source) for source in open_inputs(config, streams=True)}
    workers = config.workers or count_cores()
    for label, size in sizes.items():
        sys.stdout.write(f"{label}: {'unknown size' if size is None else format_bytes(size)}\n")
    total = sum(size or 0 for size in sizes.values())
    hours = total / 1e6 / MEGABYTES_PER_SECOND / workers / 3600
    rest = ", and more for sources of unknown size" if None in sizes.values() else ""
    sys.stdout.write(
        f"{hours:,.2f} hours on {workers} cores, at {MEGABYTES_PER_SECOND:g} MB/s of text each (docs/results.md)"
        f"{rest}\ndisk: at most {format_bytes(total * DISK_SHARE)}, for `.work` and the shards together{rest}\n"
    )


def describe(manifest: Mapping[str, Any], output_dir: str) -> Iterator[str]:
    """Yield a summary, line by line: removals per step, warnings, counts and paths."""
    from recipes_lib.data.sources.mixtures import REPEATED

    steps = manifest["steps"]
    for step, tally in steps.items():
        if (removed := tally["documents_in"] - tally["documents_out"]) > 0:
            yield f"{step}: {removed:,} of {tally['documents_in']:,} documents removed"
    yield from (f"warning: not read: {note}" for note in manifest["notes"])
    for source in manifest["sources"]:
        if source["too_often"]:
            yield f"warning: {source['epochs']:g} epochs of {source['label']}; {REPEATED}"
    tokens = "" if manifest["tokens"] is None else f", {manifest['tokens']:,} tokens"
    read = next(iter(steps.values()))["documents_in"]
    yield (
        f"{manifest['documents']:,} of {read:,} documents, {format_bytes(manifest['bytes'])}{tokens}: "
        f"{_name_dataset(manifest, output_dir)}; removed documents and reasons: {output_dir}/report.html"
    )


def _name_dataset(manifest: Mapping[str, Any], output_dir: str) -> str:
    """Return the ``dataset_name`` for training; chats and texts are separate datasets."""
    if len({source["kind"] == "chat" for source in manifest["sources"] if source["documents"]}) == 1:
        return f"dataset_name: {output_dir}"
    names = ", ".join(entry["name"] for entry in manifest["mixture"])
    return f"chats and texts, each a dataset_name: {names}"


def main_classifier(argv: Sequence[str]) -> None:
    """Run ``recipes classifier``: train or evaluate a text classifier for the steps ``classifier`` and ``toxicity``.

    Raises:
        ConfigError: A flag is wrong, the extra ``corpus`` is not installed, the classifier cannot be read or written,
            or does not have a label.
        DataError: A source cannot be read, or a label has too few documents.
    """
    options = CommandParser("classifier").parse_args(argv)
    verify_extra("recipes classifier", "corpus", "datatrove", "sklearn")
    sources = _read_labels(options.texts)
    from recipes_lib.corpus import text_classifier

    texts = {label: _read_texts(label, names) for label, names in sources.items()}
    folder: Path = options.classifier
    if options.command == "eval":
        for label in texts:
            text_classifier.verify_classifier(f"{label}=", str(folder), label)
        evaluation = text_classifier.evaluate_classifier(text_classifier.load_classifier(str(folder)), texts)
    else:
        train, held_out = text_classifier.split_held_out(texts, options.held_out)
        classifier = text_classifier.train_classifier(train)
        evaluation = text_classifier.evaluate_classifier(classifier.score, held_out)
        with explain_write_errors(folder, "name another folder"):
            classifier.save(folder, evaluation)
        text_classifier.read_linear(folder)
    sys.stdout.write("".join([f"{line}\n" for line in describe_classifier(evaluation)]))
    if options.command == "train":
        keys = f"classifier: apply, classifier_path: {folder}, classifier_label: {next(iter(texts))}"
        sys.stdout.write(f"written to {folder}; in recipes clean: {keys}\n")


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
    from recipes_lib.corpus.documents import Ledger
    from recipes_lib.corpus.inputs import ANY, READ, Read, open_inputs
    from recipes_lib.corpus.text_steps import MAX_CLASSIFIED

    texts: list[str] = []
    for source in open_inputs(CorpusConfig(sources=[{"name": name, "kind": ANY} for name in names])):
        ledger = Ledger([READ], 0)
        read = Read(source, ledger, raises=False)
        texts += [doc.text[:MAX_CLASSIFIED] for task in range(len(source.tasks)) for doc in read.run(None, task)]
        sys.stderr.write("".join([f"warning: not read: {note}\n" for note in ledger.notes]))
    if not texts:
        raise DataError(Problem(", ".join(names), f"has no text for the label {label}", "name other files"))
    return texts


def describe_classifier(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the evaluation as lines: accuracy, then ROC AUC and a precision-recall table per label."""
    documents = ", ".join(f"{count:,} {label}" for label, count in evaluation["documents"].items())
    yield f"evaluated on {documents}: accuracy {evaluation['accuracy']:.1%}"
    for label, found in evaluation["labels"].items():
        yield f"{label}: area under the ROC curve {found['roc_auc']:.3f}"
        for row in found["curve"]:
            precision = "none" if row["precision"] is None else f"{row['precision']:.1%}"
            yield f"    threshold {row['threshold']:g}: precision {precision}, recall {row['recall']:.1%}"

"""``recipes clean``: build a clean corpus from raw text, like ``recipes/corpus.py``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from recipes_lib.commands.score import load_text_scorer
from recipes_lib.config.corpus_keys import CorpusConfig, parse_corpus_command
from recipes_lib.config.loader import exit_after_help
from recipes_lib.errors import EXIT_DONE, verify_extra
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
    config = exit_after_help(parse_corpus_command(argv))
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
    sys.stdout.write(
        f"{hours:,.2f} hours on {workers} cores, at {MEGABYTES_PER_SECOND:g} MB/s of text each (docs/results.md)\n"
        f"disk: at most {format_bytes(total * DISK_SHARE)}, for `.work` and the shards together\n"
    )


def describe(manifest: Mapping[str, Any], output_dir: str) -> list[str]:
    """Return a summary, line by line: removals per step, warnings, counts and paths."""
    steps = manifest["steps"]
    lines = [
        f"{step}: {tally['documents_in'] - tally['documents_out']:,} of {tally['documents_in']:,} documents removed"
        for step, tally in steps.items()
        if tally["documents_in"] > tally["documents_out"]
    ]
    lines += [f"warning: not read: {note}" for note in manifest["notes"]]
    for source in manifest["sources"]:
        if source["too_often"]:
            found = f"{source['epochs']:g} epochs of {source['label']}"
            lines.append(f"warning: {found}; above 4, repeated tokens help little")
    tokens = "" if manifest["tokens"] is None else f", {manifest['tokens']:,} tokens"
    read = next(iter(steps.values()))["documents_in"]
    lines.append(
        f"{manifest['documents']:,} of {read:,} documents, {format_bytes(manifest['bytes'])}{tokens}: "
        f"{_name_dataset(manifest, output_dir)}; removed documents and reasons: {output_dir}/report.html"
    )
    return lines


def _name_dataset(manifest: Mapping[str, Any], output_dir: str) -> str:
    """Return the ``dataset_name`` for training; chats and texts are separate datasets."""
    if len({source["kind"] == "chat" for source in manifest["sources"] if source["documents"]}) == 1:
        return f"dataset_name: {output_dir}"
    names = ", ".join(entry["name"] for entry in manifest["mixture"])
    return f"chats and texts, each a dataset_name: {names}"

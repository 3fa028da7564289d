"""The audit of a run's texts in ``recipes check``, with the command that cleans them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.corpus import CorpusConfig
from recipes_lib.config.paths import names_path
from recipes_lib.config.schema import DatasetFormat, RecipeConfig
from recipes_lib.config.settings import is_local
from recipes_lib.data.sources.canonical import load_source, read_entries
from recipes_lib.data.sources.mixtures import list_entries
from recipes_lib.data.sources.rows import Row, Source
from recipes_lib.errors import ConfigError, DataError

if TYPE_CHECKING:
    from recipes_lib.corpus.decontamination import Index

_HUB_KEYS: Final = ("config", "revision", "split", "columns")


def say_corpus(config: RecipeConfig, kind: str, say: Callable[[str], None]) -> None:
    """Say what cleaning would find in each source of a run; nothing of sources that cannot be read.

    Args:
        config: The run.
        kind: Kind of source that ``recipes clean`` is to be told: ``text`` or ``chat``.
        say: Gets a line.
    """
    if importlib.util.find_spec("datatrove") is None:
        say("not looked at: pip install 'recipes-lib[corpus]'")
        return
    from recipes_lib.corpus.audit import audit_texts
    from recipes_lib.corpus.inputs import SpreadSource

    evaluations = _find_evaluations(config)
    protected = _index_protected(config, evaluations, say)
    for entry in list_entries(config.data):
        # A stream is read to the end of the sample, and no further.
        keys = {name: entry[name] for name in _HUB_KEYS if entry.get(name)}
        try:
            source = load_source(
                entry["name"],
                **keys,
                streaming=config.data.dataset_streaming,
                text_documents=config.pretraining.text_documents,
            )
            texts = _iterate_texts(SpreadSource(source), entry.get("format") or config.data.dataset_format)
            audit = audit_texts(texts, protected)
        except DataError:
            continue  # The section above has said so.
        for fact in audit.facts:
            say(f"{entry['name']}: {fact}")
        for warning in audit.warnings:
            say(f"warning: {entry['name']}: {warning}")
        if audit.warnings:
            told = {"name": entry["name"], "kind": kind, **keys}
            of = f" --benchmarks_of '{json.dumps(evaluations)}'" if evaluations else ""
            say(
                f"    recipes clean --sources '{json.dumps([told])}' --output_dir {entry['name'].rstrip('/')}-clean{of}"
            )


def _find_evaluations(config: RecipeConfig) -> list[str]:
    """The configurations of ``recipes eval`` that lie beside that of the run."""
    return [] if config.path is None else sorted(map(str, config.path.parent.glob("eval*.yaml")))


def _index_protected(config: RecipeConfig, evaluations: list[str], say: Callable[[str], None]) -> Index:
    """The items of the held-out file and of the evaluations' tasks whose data are local files."""
    from recipes_lib.corpus.decontamination import Index, read_items

    index, held_out = Index(CorpusConfig().decontamination_ngram), config.data.dataset_test_split
    benchmarks: list[Mapping[str, Any]] = []
    for path in evaluations if importlib.util.find_spec("lm_eval") else ():
        from recipes_lib.config.evaluation import read_evaluated_tasks
        from recipes_lib.evaluation.suites import list_datasets

        try:
            evaluated = read_evaluated_tasks(path)
            # lm-eval's own tasks have their data on the Hub, and take long to list.
            benchmarks += list_datasets(evaluated) if evaluated.include_path else []
        except ConfigError as error:
            say(f"{path}: not looked at: {error.problems[0].found}")
    try:
        for benchmark in benchmarks:
            for text in read_items(benchmark) if is_local(benchmark["name"]) else ():
                index.add(benchmark["label"], text)
        if held_out is not None and names_path(held_out):
            for text in _iterate_texts(load_source(held_out), config.data.dataset_format):
                index.add(held_out, text)
    except DataError as error:
        say(f"benchmarks: not looked at: {error.problems[0].found}")
    return index


def _iterate_texts(source: Source, declared: DatasetFormat) -> Iterator[str]:
    for row in read_entries(source, declared):
        if not isinstance(row, Row):
            yield ""  # Counted with those that are empty.
            continue
        if row.messages is not None:
            texts = [message.get("content") for message in row.messages]
        else:
            texts = [row.text, row.prompt, row.completion]
        yield "\n".join(text for text in texts if isinstance(text, str))

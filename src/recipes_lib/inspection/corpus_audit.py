"""The audit of a run's texts in ``recipes check``, with the command that cleans them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Final

from recipes_lib.config.schema import DatasetFormat, RecipeConfig
from recipes_lib.data.sources.canonical import load_source, read_entries
from recipes_lib.data.sources.mixtures import list_entries
from recipes_lib.data.sources.rows import Row, Source
from recipes_lib.errors import DataError

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
            audit = audit_texts(_iterate_texts(source, entry.get("format") or config.data.dataset_format))
        except DataError:
            continue  # The section above has said so.
        for fact in audit.facts:
            say(f"{entry['name']}: {fact}")
        for warning in audit.warnings:
            say(f"warning: {entry['name']}: {warning}")
        if audit.warnings:
            told = {"name": entry["name"], "kind": kind, **keys}
            say(f"    recipes clean --sources '{json.dumps([told])}' --output_dir {entry['name'].rstrip('/')}-clean")


def _iterate_texts(source: Source, declared: DatasetFormat) -> Iterator[str]:
    for row in read_entries(source, declared):
        if not isinstance(row, Row):
            continue
        if row.messages is not None:
            texts = [message.get("content") for message in row.messages]
        else:
            texts = [row.text, row.prompt, row.completion]
        yield "\n".join(text for text in texts if isinstance(text, str))

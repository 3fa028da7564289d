"""Sources of a pretraining run and the content keys of their token sets, independent of mixture weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from recipes_lib.config.schema import DataConfig, DatasetFormat, RecipeConfig, TokensConfig
from recipes_lib.data.packed.encoding import read_seed
from recipes_lib.data.packed.keys import collect_inputs
from recipes_lib.data.sources.canonical import load_source, read_entries, read_rows
from recipes_lib.data.sources.mixtures import compute_budgets, find_held_out, list_entries
from recipes_lib.data.sources.rows import Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, raise_problems

WITHOUT_EFFECT: Final = frozenset(
    {
        "packed/audit.py",
        "packed/collators.py",
        "packed/prepared_set.py",
        "packed/preview.py",
        "packed/training_data.py",
        "tokens/dataset.py",
        "tokens/token_data.py",
    }
)
"""Modules of this room that decide no byte of a token set, so that changing them makes no set anew."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of one source.

    Attributes:
        name: What the user called it; unlike that of any other source of the run.
        source: Its rows.
        format: Layout of its rows.
        test_size: Share or number of documents to hold out, or ``None``.
        seed: Decides which.
        num_tokens: Reading stops at the end of the document that brings the training tokens to this; ``None``: never.
        tokens: What happens to rows that are broken.
    """

    name: str
    source: Source
    format: DatasetFormat
    test_size: float | int | None = None
    seed: int = 0
    num_tokens: int | None = None
    tokens: TokensConfig = field(default_factory=TokensConfig)

    def entries(self) -> Iterator[Row | Problem]:
        """Read the documents from the start, and the problem that stands in the place of one.

        Raises:
            DataError: Once, at the end: the source cannot be read further.
        """
        return read_entries(self.source, self.format)

    def rows(self) -> Iterator[Row]:
        """Read the documents that are sound.

        Raises:
            DataError: Once, at the end: all that is wrong, where more is broken than may be.
        """
        return read_rows(self.source, self.format, self.tokens)

    def collect_inputs(self, config: RecipeConfig) -> dict[str, Any]:
        """Everything that decides its token set, as JSON values; the key is their hash.

        Raises:
            ConfigError: The tokenizer or the chat template cannot be found.
            DataError: A file cannot be read.
        """
        inputs = collect_inputs(select_options(config), {"documents": self.source.fingerprint()})
        return {
            **inputs,
            "code": {name: digest for name, digest in inputs["code"].items() if name not in WITHOUT_EFFECT},
            "format": self.format,
            "held_out": None if self.test_size is None else [self.test_size, self.seed],
            "num_tokens": self.num_tokens,
        }


def select_options(config: RecipeConfig) -> RecipeConfig:
    """The run with only those options of its data and tokens that decide which rows are tokenised, and how."""
    tokens = config.tokens
    return dataclasses.replace(
        config,
        data=DataConfig(),
        tokens=TokensConfig(
            loss_on="all",
            chat_template_path=tokens.chat_template_path,
            eos_token=tokens.eos_token,
            broken_rows=tokens.broken_rows,
            max_broken_fraction=tokens.max_broken_fraction,
        ),
    )


def load_corpora(config: RecipeConfig, num_tokens: int | None = None) -> list[Corpus]:
    """Open the sources to train on: those of ``dataset_mixture``, or the one dataset.

    Args:
        config: The run.
        num_tokens: Tokens that the run trains on; how far streams are read.

    Raises:
        ConfigError: One source is listed twice, or it is not known how far to read a stream.
        DataError: A source cannot be opened.
    """
    entries = list_entries(config.data)
    names = _name_entries(entries)
    budgets = compute_budgets(config, num_tokens) if config.data.dataset_streaming else [None] * len(entries)
    corpora: list[Corpus] = []
    problems: list[Problem] = []
    for entry, name, budget in zip(entries, names, budgets, strict=True):
        try:
            source = _load_entry(config, entry)
        except DataError as error:
            problems += error.problems
            continue
        corpus = Corpus(
            name=name,
            source=source,
            format=entry.get("format", config.data.dataset_format),
            test_size=config.data.test_split_size if config.data.dataset_test_split is None else None,
            seed=read_seed(config),
            num_tokens=budget,
            tokens=config.tokens,
        )
        corpora.append(corpus)
    raise_problems(problems, "dataset_mixture")
    return corpora


def load_held_out(config: RecipeConfig) -> Corpus | None:
    """Open the held-out source that ``dataset_test_split`` names.

    Raises:
        ConfigError: As ``find_held_out``.
        DataError: It cannot be opened.
    """
    where = config.provenance.get("dataset_test_split", "dataset_test_split")
    entry = find_held_out(config.data, where)
    if entry is None:
        return None
    name = str(config.data.dataset_test_split)
    source = _load_entry(config, entry)
    return Corpus(name=name, source=source, format=config.data.dataset_format, tokens=config.tokens)


def load_eval_corpora(config: RecipeConfig) -> list[Corpus]:
    """Open the sources that ``eval_datasets`` names.

    Raises:
        DataError: One cannot be opened.
    """
    return [
        Corpus(
            name=name,
            source=_load_entry(config, entry),
            format=entry.get("format", config.data.dataset_format),
            tokens=config.tokens,
        )
        for name, entry in (config.data.eval_datasets or {}).items()
    ]


def _name_entries(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The entries' names, with configuration and split where the name alone is not unique."""
    counts = Counter(entry["name"] for entry in entries)
    full = [":".join(filter(None, map(entry.get, ("name", "config", "revision", "split")))) for entry in entries]
    names = [name if counts[entry["name"]] > 1 else entry["name"] for entry, name in zip(entries, full, strict=True)]
    for name in names:
        if names.count(name) > 1:
            found = f"`{name}` is listed {names.count(name)} times"
            raise ConfigError(Problem("dataset_mixture", found, "list it once, with a higher weight"))
    return names


def _load_entry(config: RecipeConfig, entry: Mapping[str, Any]) -> Source:
    return load_source(
        entry["name"],
        config=entry.get("config"),
        revision=entry.get("revision"),
        split=entry.get("split", "train"),
        columns=entry.get("columns", config.data.dataset_columns),
        streaming=config.data.dataset_streaming,
        text_documents=config.pretraining.text_documents,
    )

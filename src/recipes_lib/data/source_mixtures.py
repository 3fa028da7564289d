"""Several sources as one, each with its weight; a single dataset is a mixture of one."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np

from recipes_lib.config.paths import expand_home, names_path
from recipes_lib.config.schema import DataConfig, DatasetFormat, TokensConfig
from recipes_lib.config.settings import is_local
from recipes_lib.data.broken_rows import BrokenRows
from recipes_lib.data.rows import Row
from recipes_lib.data.source_rows import Source
from recipes_lib.data.sources import load_source, read_entries
from recipes_lib.data.token_weights import list_entries
from recipes_lib.errors import ConfigError, DataError, Problem, raise_problems

PART_KEYS: Final = ("name", "weight", "config", "revision", "split", "format")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a mixture.

    Attributes:
        source: Its rows.
        weight: How many times its rows come up: 0.25 is a quarter of them, drawn without replacement; 2.5 is two whole
            passes and a half.
        format: Layout of its rows.
    """

    source: Source
    weight: float = 1.0
    format: DatasetFormat = "auto"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The rows of all parts, part after part and in their own order; whoever trains shuffles.

    Attributes:
        parts: The parts.
        seed: Decides which rows a fractional weight draws.
    """

    parts: Sequence[Part]
    seed: int = 0

    @property
    def name(self) -> str:
        """What the user called its sources."""
        return " + ".join(part.source.name for part in self.parts)

    @property
    def streaming(self) -> bool:
        """Whether a source is a stream."""
        return any(part.source.streaming for part in self.parts)

    def rows(self, tokens: TokensConfig | None = None) -> Iterator[Row]:
        """Read the rows that are sound.

        Raises:
            DataError: Once, after all parts are read: all that is wrong, where more is broken than ``tokens`` allow.
        """
        return BrokenRows(tokens, is_stream=self.streaming).read(self.entries(), self.name)

    def fingerprint(self) -> str:
        """SHA-256 of the sources' fingerprints, the layouts asked for, the weights, and the seed if rows are drawn."""
        parts = [[part.source.fingerprint(), part.weight, part.format] for part in self.parts]
        seed = self.seed if any(part.weight % 1 for part in self.parts) else None
        return hashlib.sha256(json.dumps([parts, seed]).encode()).hexdigest()

    def entries(self) -> Iterator[Row | Problem]:
        """Read the rows, or the problem that stands in the place of one; told once, however often the row comes up.

        Raises:
            DataError: Once, after all parts are read: what is wrong with whole sources.
        """
        problems: list[Problem] = []
        for part in self.parts:
            try:
                yield from self._read(part)
            except DataError as error:
                problems += error.problems
        raise_problems(problems, self.name)

    def _read(self, part: Part) -> Iterator[Row | Problem]:
        drawn = self._draw(part)
        if part.weight < 1 and drawn and not any(drawn):
            found = f"its weight, {part.weight:g}, draws none of its {len(drawn):,} rows"
            raise DataError(Problem(part.source.name, found, "raise the weight, or take it out of the mixture"))
        for number in range(math.ceil(part.weight)):
            is_whole = number < math.floor(part.weight)
            for index, entry in enumerate(read_entries(part.source, part.format)):
                if (not number) if isinstance(entry, Problem) else is_whole or drawn[index]:
                    yield entry

    def _draw(self, part: Part) -> Sequence[bool]:
        """Mark the rows that the fraction of the weight draws; the draw depends on the part and the seed alone."""
        fraction = part.weight % 1
        if not fraction:
            return ()
        num_rows = sum(1 for _ in part.source.rows())
        key = hashlib.blake2b(part.source.fingerprint().encode(), digest_size=8).digest()
        order = np.random.default_rng([self.seed, int.from_bytes(key)]).permutation(num_rows)
        drawn = np.zeros(num_rows, dtype=np.bool_)
        drawn[order[: round(fraction * num_rows)]] = True
        marks: list[bool] = drawn.tolist()
        return marks


def load_train_data(data: DataConfig, *, seed: int = 0) -> Mixture:
    """Open what is trained on: ``dataset_name``, or the parts of ``dataset_mixture``.

    Raises:
        ConfigError: Both or neither are set, the mixture is to be streamed, or a part of it is wrong.
        DataError: A source cannot be opened.
    """
    if (data.dataset_name is None) == (data.dataset_mixture is None):
        state = "neither is set" if data.dataset_name is None else "both are set"
        raise ConfigError(Problem("dataset_name, dataset_mixture", state, "set one of the two"))
    if data.dataset_mixture is None:
        source = load_source(**list_entries(data)[0], streaming=data.dataset_streaming)
        return Mixture(parts=[Part(source=source, format=data.dataset_format)])
    if data.dataset_streaming:
        found = "a mixture cannot be streamed: its parts would be trained on one after another"
        raise ConfigError(Problem("dataset_streaming", found, "set it to false, or mix the data on disk first"))
    return build_mixture(data.dataset_mixture, default_format=data.dataset_format, seed=seed)


def load_test_data(data: DataConfig) -> Mixture | None:
    """Open the held-out data that ``dataset_test_split`` names.

    Raises:
        ConfigError: As ``find_held_out``.
        DataError: It cannot be opened.
    """
    entry = find_held_out(data)
    if entry is None:
        return None
    source = load_source(**entry, streaming=data.dataset_streaming)
    return Mixture(parts=[Part(source=source, format=data.dataset_format)])


def find_held_out(data: DataConfig, where: str = "dataset_test_split") -> dict[str, Any] | None:
    """What ``dataset_test_split`` names, as an entry of a mixture: a split of ``dataset_name``, or a path.

    The spelling alone says which, so that no file that happens to lie there changes what is held out.

    Args:
        data: Which data.
        where: Where the key stands, for the error.

    Raises:
        ConfigError: It is a path and nothing is there, or a split and the training data are a mixture.
    """
    name = data.dataset_test_split
    if name is None:
        return None
    if names_path(name):
        if not is_local(expand_home(name)):
            raise ConfigError(Problem(where, f"there is no file or folder `{name}`", "correct the path"))
        return {"name": name}
    if data.dataset_name is None:
        found = f"`{name}` is the name of a split, and a mixture has no splits"
        raise ConfigError(Problem(where, found, f"name a held-out path (./{name}), or set `test_split_size`"))
    return {**list_entries(data)[0], "split": name}


def build_mixture(
    parts: Sequence[Mapping[str, Any]], *, default_format: DatasetFormat = "auto", seed: int = 0
) -> Mixture:
    """Open the parts of a ``dataset_mixture``, each ``{name, weight, config, revision, split, format}``.

    All keys but the name are optional; see ``Part`` for what a weight means.

    Raises:
        ConfigError: A part has an unknown key, no name, or a value of the wrong kind.
        DataError: A source cannot be opened.
    """
    problems = [problem for number, part in enumerate(parts) for problem in _check_part(part, number)]
    if not parts:
        problems.append(Problem("dataset_mixture", "it is empty", "list at least one {name: ...}"))
    if problems:
        raise ConfigError(*problems)
    loaded = []
    for part in parts:
        try:
            loaded.append(_load_part(part, default_format))
        except DataError as error:
            problems += error.problems
    raise_problems(problems, "dataset_mixture")
    return Mixture(parts=loaded, seed=seed)


def _load_part(part: Mapping[str, Any], default_format: DatasetFormat) -> Part:
    source = load_source(
        part["name"], config=part.get("config"), revision=part.get("revision"), split=part.get("split", "train")
    )
    return Part(source=source, weight=float(part.get("weight", 1.0)), format=part.get("format", default_format))


def _check_part(part: Mapping[str, Any], number: int) -> Iterator[Problem]:
    where = f"dataset_mixture[{number}]"
    if not isinstance(part, Mapping):
        yield Problem(where, "it is not a mapping", "write {name: ..., weight: ...}")
        return
    for key in part:
        if key not in PART_KEYS:
            nearest = difflib.get_close_matches(str(key), PART_KEYS, n=1)
            advice = f"did you mean `{nearest[0]}`?" if nearest else f"known keys: {', '.join(PART_KEYS)}"
            yield Problem(where, f"unknown key `{key}`", advice)
    if not part.get("name"):
        yield Problem(where, "it has no name", "add `name`, a Hub id or a path")
    for key in ("name", "config", "revision", "split"):
        if not isinstance(part.get(key, ""), str):
            yield Problem(where, f"`{key}` is not a string", "quote it")
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        yield Problem(where, f"`weight` is {weight!r}", "write how many times its rows come up: 0.5, 1, 2.5")
    if part.get("format", "auto") not in get_args(DatasetFormat):
        found = f"`format` is {part['format']!r}"
        yield Problem(where, found, f"use one of {', '.join(get_args(DatasetFormat))}")

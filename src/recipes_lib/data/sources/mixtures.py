"""Dataset mixtures: weights, repeats and shares of several sources; a single dataset is a mixture of one."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from recipes_lib.config.paths import expand_home, names_path
from recipes_lib.config.schema import DataConfig, DatasetFormat, RecipeConfig, TokensConfig
from recipes_lib.config.settings import is_local
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.canonical import open_entry, read_entries
from recipes_lib.data.sources.rows import Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, collecting, raise_problems

MAX_EPOCHS: Final = 4
"""Repeating data up to four times is almost as good as new data; beyond, its value decays (Muennighoff et al. 2023)."""


def list_entries(data: DataConfig) -> Sequence[Mapping[str, Any]]:
    """The entries of ``dataset_mixture``, or the single dataset as such an entry."""
    if data.dataset_mixture is not None:
        return data.dataset_mixture
    entry = {
        "name": data.dataset_name,
        "config": data.dataset_config,
        "revision": data.dataset_revision,
        "split": data.dataset_train_split,
        "columns": data.dataset_columns,
    }
    return [entry]


def derive_eval_configs(config: RecipeConfig, max_length: int) -> dict[str, RecipeConfig]:
    """Return, for each set of ``eval_datasets``, the configuration that prepares its rows like training rows.

    Args:
        config: The run.
        max_length: Tokens that its rows have room for.
    """
    nothing: dict[str, Any] = {
        **dict.fromkeys(("dataset_name", "dataset_config", "dataset_revision", "dataset_columns", "eval_datasets")),
        **dict.fromkeys(("dataset_test_split", "test_split_size")),
    }
    tokens = replace(config.tokens, max_length=max_length)
    return {
        name: replace(
            config,
            tokens=tokens,
            data=replace(config.data, **nothing, dataset_streaming=False, dataset_mixture=[entry]),
        )
        for name, entry in (config.data.eval_datasets or {}).items()
    }


def compute_weights(config: RecipeConfig, num_tokens: Sequence[int]) -> list[float]:
    """Share of training tokens of each source; they sum to 1.

    The ``weight`` of a mixture's entry is relative to the sum of all; entries without one count 1. If no entry has a
    weight, shares are proportional to tokens times ``repeat``: by default all sources have the same number of epochs.

    Args:
        config: The run.
        num_tokens: Training tokens of each source.
    """
    repeats = [entry.get("repeat", 1.0) for entry in list_entries(config.data)]
    weights = _read_weights(config) or [repeat * num for repeat, num in zip(repeats, num_tokens, strict=True)]
    return [weight / sum(weights) for weight in weights]


def compute_budgets(config: RecipeConfig, num_tokens: int | None) -> list[int]:
    """Tokens to read of each streamed source, so that none is repeated before the end of the run.

    Args:
        config: The run.
        num_tokens: Tokens that the run trains on.

    Raises:
        ConfigError: The run's length or the sources' shares are not known, or a number of documents is to be held out.
    """
    weights = _read_weights(config)
    _refuse_unknowable(config, weights, num_tokens)
    assert num_tokens is not None
    shares = share_tokens(config, num_tokens, weights or ())
    # A source can be ahead of its weight by a window in each phase, and each later phase begins at a row boundary.
    slack = (2 * len(config.pretraining.dataset_curriculum or [{}]) - 1) * (config.tokens.max_length or 0)
    return [math.ceil(share) + slack for share in shares]


def share_tokens(config: RecipeConfig, num_tokens: int, weights: Sequence[float]) -> list[float]:
    """Return the tokens of each source that a run trains on, over all phases of its curriculum.

    Args:
        config: The run.
        num_tokens: Of the run.
        weights: Of the sources, without a curriculum.
    """
    phases = config.pretraining.dataset_curriculum or [{"start_tokens": 0, "weights": weights}]
    borders = [*(min(phase["start_tokens"], num_tokens) for phase in phases), num_tokens]
    shares = [0.0] * len(list_entries(config.data))
    for phase, (start, stop) in zip(phases, itertools.pairwise(borders), strict=True):
        for at, weight in enumerate(phase["weights"]):
            shares[at] += (stop - start) * weight / sum(phase["weights"])
    return shares


def _read_weights(config: RecipeConfig) -> list[float] | None:
    """The weights of the entries, or ``None`` if none has one."""
    entries = list_entries(config.data)
    if len(entries) > 1 and all("weight" not in entry for entry in entries):
        return None
    return [entry.get("weight", 1.0) for entry in entries]


def _refuse_unknowable(config: RecipeConfig, weights: Sequence[float] | None, num_tokens: int | None) -> None:
    problems = []
    size = config.data.test_split_size
    if size is not None and size >= 1:
        remedy = "write a share below 1, or name held-out data: dataset_test_split"
        found = "a number of documents is drawn among all of them, and a stream is not read to its end"
        problems.append(("test_split_size", found, remedy))
    if num_tokens is None:
        problems.append(("dataset_streaming", "it is not known how far to read", "write `max_tokens: ...`"))
    if weights is None and config.pretraining.dataset_curriculum is None:
        found = "it is not known how far to read each source of the mixture"
        problems.append(("dataset_streaming", found, "give each a `weight`"))
    if problems:
        raise ConfigError(*(Problem(config.provenance.get(key, key), *words) for key, *words in problems))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a mixture.

    Attributes:
        source: Its rows.
        weight: Its share of the mixture, relative to the sum of the parts'; ``None``: ``repeat`` says how many rows.
        repeat: How many times its rows come up: 0.25 is a quarter of them, drawn without replacement; 2.5 is two whole
            passes and a half.
        format: Layout of its rows.
    """

    source: Source
    weight: float | None = None
    repeat: float = 1.0
    format: DatasetFormat = "auto"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The rows of all parts, one part after the other, in order; the trainer shuffles.

    For weighted parts, as many rows are used as possible without repeating any: all rows of the part that is scarcest
    for its weight, and a sample of each other part. ``datasets.interleave_datasets`` stops in the same way at
    ``first_exhausted``.

    Attributes:
        parts: The parts; all have a weight, or none.
        seed: Decides which rows a fraction of a part draws.
    """

    parts: Sequence[Part]
    seed: int = 0

    @property
    def name(self) -> str:
        """Names of the sources, as given by the user."""
        return " + ".join(part.source.name for part in self.parts)

    @property
    def streaming(self) -> bool:
        """Whether a source is a stream."""
        return any(part.source.streaming for part in self.parts)

    def rows(self, tokens: TokensConfig | None = None) -> Iterator[Row]:
        """Read the valid rows.

        Raises:
            DataError: Once, after all parts are read: all that is wrong, where more is broken than ``tokens`` allow.
        """
        return BrokenRows(tokens, is_stream=self.streaming).read(self.entries(), self.name)

    def fingerprint(self) -> str:
        """SHA-256 of the sources' fingerprints, the requested layouts, the amounts, and the seed if it matters."""
        parts = [[part.source.fingerprint(), part.weight, part.repeat, part.format] for part in self.parts]
        seed = self.seed if any(part.weight is not None or part.repeat % 1 for part in self.parts) else None
        return hashlib.sha256(json.dumps([parts, seed]).encode()).hexdigest()

    def entries(self) -> Iterator[Row | Problem]:
        """Read the rows, or the problem in place of one, which is reported once even if the row is repeated.

        Raises:
            DataError: Once, after all parts are read: what is wrong with whole sources.
        """
        problems: list[Problem] = []
        for part, num_passes in zip(self.parts, self._count_passes(), strict=True):
            with collecting(problems):
                yield from self._read(part, num_passes)
        raise_problems(problems, self.name)

    def find_places(self, numbers: Collection[int]) -> dict[int, str]:
        """Return the places of rows by their number among ``entries``; reads them again, up to the last one."""
        stop = max(numbers, default=-1) + 1
        entries = enumerate(itertools.islice(self.entries() if stop else (), stop))
        return {number: entry.where for number, entry in entries if number in numbers}

    def _count_passes(self) -> list[float]:
        """Number of passes over the rows of each part."""
        weights = [part.weight for part in self.parts if part.weight is not None]
        if not weights:
            return [part.repeat for part in self.parts]
        counts = [sum(1 for _ in part.source.rows()) for part in self.parts]
        # The scarcest source for its weight limits the others, since none is repeated.
        total = min(count / weight for count, weight in zip(counts, weights, strict=True))
        return [round(total * weight) / max(1, count) for count, weight in zip(counts, weights, strict=True)]

    def _read(self, part: Part, num_passes: float) -> Iterator[Row | Problem]:
        drawn = self._draw(part, num_passes % 1)
        if num_passes < 1 and not any(drawn):
            key, value = ("repeat", part.repeat) if part.weight is None else ("weight", part.weight)
            found = f"its {key}, {value:g}, draws none of its {len(drawn):,} rows"
            raise DataError(Problem(part.source.name, found, f"raise the {key}, or take it out of the mixture"))
        for number in range(math.ceil(num_passes)):
            is_whole = number < math.floor(num_passes)
            for index, entry in enumerate(read_entries(part.source, part.format)):
                if (not number) if isinstance(entry, Problem) else is_whole or drawn[index]:
                    yield entry

    def _draw(self, part: Part, fraction: float) -> Sequence[bool]:
        """Mask of the rows drawn by a fraction; a function of the part and the seed."""
        if not fraction:
            return ()
        num_rows = sum(1 for _ in part.source.rows())
        key = hashlib.blake2b(part.source.fingerprint().encode(), digest_size=8).digest()
        # The content is in the seed, so that two sources of one length draw different rows.
        order = np.random.default_rng([self.seed, int.from_bytes(key)]).permutation(num_rows)
        drawn = np.zeros(num_rows, dtype=np.bool_)
        drawn[order[: round(fraction * num_rows)]] = True
        marks: list[bool] = drawn.tolist()
        return marks


def load_train_data(data: DataConfig, *, seed: int = 0) -> Mixture:
    """Open the training data: ``dataset_name``, or the parts of ``dataset_mixture``.

    Raises:
        ConfigError: As ``build_mixture``.
        DataError: A source cannot be opened.
    """
    # The sources of a mixture are streamed for pretraining only, which opens them itself.
    streaming = data.dataset_streaming and data.dataset_mixture is None
    defaults = {"format": data.dataset_format, "columns": data.dataset_columns, "streaming": streaming}
    return build_mixture([{**defaults, **part} for part in list_entries(data)], seed=seed)


def load_test_data(data: DataConfig) -> Mixture | None:
    """Open the held-out data of ``dataset_test_split``.

    Raises:
        ConfigError: As ``find_held_out``.
        DataError: It cannot be opened.
    """
    entry = find_held_out(data)
    defaults = {"format": data.dataset_format, "streaming": data.dataset_streaming}
    return None if entry is None else build_mixture([{**defaults, **entry}])


def find_held_out(data: DataConfig, where: str = "dataset_test_split") -> dict[str, Any] | None:
    """Return ``dataset_test_split`` as an entry of a mixture: a split of ``dataset_name``, or a path.

    Only the spelling decides, so that existing files cannot change which rows are held out.

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
        return {"name": name, "columns": data.dataset_columns}
    if data.dataset_name is None:
        found = f"`{name}` is the name of a split, and a mixture has no splits"
        raise ConfigError(Problem(where, found, f"name a held-out path (./{name}), or set `test_split_size`"))
    return {**list_entries(data)[0], "split": name}


def build_mixture(parts: Sequence[Mapping[str, Any]], *, seed: int = 0) -> Mixture:
    """Open the parts of a ``dataset_mixture``, which the configuration has read strictly.

    Each is ``{name, weight, repeat, config, revision, split, format, columns}``; all have a weight, or none.

    All keys but the name are optional; see ``Part`` for what they mean.

    Raises:
        ConfigError: ``columns`` of a part names what no layout has.
        DataError: A source cannot be opened.
    """
    problems: list[Problem] = []
    loaded = []
    for part in parts:
        with collecting(problems):
            amounts = {key: part[key] for key in ("weight", "repeat", "format") if key in part}
            loaded.append(Part(source=open_entry(part), **amounts))
    raise_problems(problems, "dataset_mixture")
    return Mixture(parts=loaded, seed=seed)

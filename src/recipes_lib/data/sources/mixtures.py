"""Dataset mixtures: weights, repeats and token shares of several sources; a single dataset is a mixture of one."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.config.paths import expand_home, is_local, names_path
from recipes_lib.config.schema import DataConfig, DatasetFormat, RecipeConfig, TokensConfig
from recipes_lib.data.sources.canonical import open_entry, read_entries
from recipes_lib.data.sources.rows import BrokenRows, Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems, raise_problems

MAX_EPOCHS: Final = 4
"""Epochs up to which repeated data are almost as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""
REPEATED: Final = f"above {MAX_EPOCHS}, repeated tokens help little"
"""Reason of a warning about more epochs."""


def list_entries(data: DataConfig) -> Sequence[Mapping[str, Any]]:
    """Return the entries of ``dataset_mixture``, or the single dataset as such an entry."""
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
    """Return, for each name in ``eval_datasets``, the configuration that prepares its rows like training rows.

    Args:
        config: Configuration of the run.
        max_length: Maximum length of its rows, in tokens.
    """
    unset: dict[str, Any] = dict.fromkeys(("dataset_name", "dataset_config", "dataset_revision", "eval_datasets"))
    data = replace(config.data, **unset, dataset_test_split=None, test_split_size=None, dataset_streaming=False)
    run, sets = replace(config, tokens=replace(config.tokens, max_length=max_length)), config.data.eval_datasets or {}
    return {name: replace(run, data=replace(data, dataset_mixture=[entry])) for name, entry in sets.items()}


def compute_weights(config: RecipeConfig, num_tokens: Sequence[int]) -> list[float]:
    """Return the share of each source in the training tokens; shares sum to 1.

    The ``weight`` of an entry is relative to the sum over all entries; the default is 1. If no entry has a weight,
    shares are proportional to tokens times ``repeat``, so that by default all sources have the same number of epochs.

    Args:
        config: Configuration of the run.
        num_tokens: Number of training tokens of each source.
    """
    repeats = [entry.get("repeat", 1.0) for entry in list_entries(config.data)]
    weights = _read_weights(config) or [repeat * num for repeat, num in zip(repeats, num_tokens, strict=True)]
    return [weight / sum(weights) for weight in weights]


def compute_budgets(config: RecipeConfig, num_tokens: int | None) -> list[int]:
    """Return the number of tokens to read from each streamed source, so that none repeats during the run.

    Args:
        config: Configuration of the run.
        num_tokens: Number of tokens that the run trains on.

    Raises:
        ConfigError: The length of the run or the weights of the sources are unknown, or ``test_split_size`` is a number
            of documents.
    """
    weights = _read_weights(config)
    _refuse_unknown_length(config, weights, num_tokens)
    assert num_tokens is not None
    shares = share_tokens(config, num_tokens, weights or ())
    # In each phase, a source can be ahead of its share by less than one row of `max_length` tokens; and each later
    # phase starts at a row boundary, which can shift up to one more row to it.
    slack = (2 * len(config.pretraining.dataset_curriculum or [{}]) - 1) * (config.tokens.max_length or 0)
    return [math.ceil(share) + slack for share in shares]


def share_tokens(config: RecipeConfig, num_tokens: int, weights: Sequence[float]) -> list[float]:
    """Return the number of tokens that a run trains on from each source, over all phases of its curriculum.

    Args:
        config: Configuration of the run.
        num_tokens: Number of tokens that the run trains on.
        weights: Weights of the sources if the run has no ``dataset_curriculum``.
    """
    phases = config.pretraining.dataset_curriculum or [{"start_tokens": 0, "weights": weights}]
    boundaries = [*(min(phase["start_tokens"], num_tokens) for phase in phases), num_tokens]
    shares = [0.0] * len(list_entries(config.data))
    for phase, (start, stop) in zip(phases, itertools.pairwise(boundaries), strict=True):
        for at, weight in enumerate(phase["weights"]):
            shares[at] += (stop - start) * weight / sum(phase["weights"])
    return shares


def _read_weights(config: RecipeConfig) -> list[float] | None:
    """Return the weights of the entries, 1 by default; ``None`` if no entry of a mixture has one."""
    entries = list_entries(config.data)
    if len(entries) > 1 and all("weight" not in entry for entry in entries):
        return None
    return [entry.get("weight", 1.0) for entry in entries]


def _refuse_unknown_length(config: RecipeConfig, weights: Sequence[float] | None, num_tokens: int | None) -> None:
    problems = []
    size = config.data.test_split_size
    if size is not None and size >= 1:
        remedy = "write a share below 1, or name held-out data: dataset_test_split"
        found = "a number of documents is drawn from all documents, and a stream is not read to its end"
        problems.append(("test_split_size", found, remedy))
    if num_tokens is None:
        problems.append(("dataset_streaming", "it is not known how far to read", "write `max_tokens: ...`"))
    if weights is None and config.pretraining.dataset_curriculum is None:
        found = "it is not known how far to read each source of the mixture"
        problems.append(("dataset_streaming", found, "give each a `weight`"))
    if problems:
        raise ConfigError(*(Problem(config.locate(key), *words) for key, *words in problems))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a mixture.

    Attributes:
        source: The rows.
        weight: Share of the mixture, relative to the sum over all parts; ``None`` if ``repeat`` determines the number
            of rows.
        repeat: Number of passes over the rows: 0.25 is a quarter of them, drawn without replacement; 2.5 is two full
            passes and a half.
        format: Layout of the rows.
    """

    source: Source
    weight: float | None = None
    repeat: float = 1.0
    format: DatasetFormat = "auto"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The rows of all parts, one part after the other, unshuffled; the trainer shuffles.

    With weights, the mixture has as many rows as possible without repetition: all rows of the part with the fewest rows
    for its weight, and a sample of each other part. This is the ``first_exhausted`` strategy of
    ``datasets.interleave_datasets``.

    Attributes:
        parts: The parts; either all or none have a weight.
        seed: Seed of the rows that are drawn from a part.
    """

    parts: Sequence[Part]
    seed: int = 0

    @property
    def name(self) -> str:
        """Names of the sources, as configured."""
        return " + ".join(part.source.name for part in self.parts)

    @property
    def streaming(self) -> bool:
        """Whether any source is streamed."""
        return any(part.source.streaming for part in self.parts)

    def rows(self, tokens: TokensConfig | None = None) -> Iterator[Row]:
        """Yield the valid rows.

        Args:
            tokens: Options for broken rows. Default: broken rows are errors.

        Raises:
            DataError: Too many rows are broken, or a source cannot be read; raised after the last row.
        """
        return BrokenRows(tokens, is_stream=self.streaming).read(self.entries(), self.name)

    def fingerprint(self) -> str:
        """Return the SHA-256 of fingerprints, amounts and layouts of all parts, and of the seed if rows are drawn."""
        parts = [[part.source.fingerprint(), part.weight, part.repeat, part.format] for part in self.parts]
        seed = self.seed if any(part.weight is not None or part.repeat % 1 for part in self.parts) else None
        return hashlib.sha256(json.dumps([parts, seed]).encode()).hexdigest()

    def entries(self) -> Iterator[Row | Problem]:
        """Yield each row, or a ``Problem`` in place of a broken one, once even if the row is repeated.

        Raises:
            DataError: Sources are empty or cannot be read further; raised after the last row, for all sources.
        """
        problems: list[Problem] = []
        for part, counts in zip(self.parts, self._count_passes(), strict=True):
            with collect_problems(problems):
                yield from self._read(part, *counts)
        raise_problems(problems, self.name)

    def find_places(self, row_ids: npt.NDArray[np.int64], positions: Collection[int]) -> dict[int, str]:
        """Return the locations of rows by position, for errors; reads the sources again up to the last of them.

        Args:
            row_ids: Position of each row in ``entries``, ``int64 (R,)``.
            positions: Positions in ``row_ids``.
        """
        numbers = {position: int(row_ids[position]) for position in positions}
        stop = max(numbers.values(), default=-1) + 1
        entries = enumerate(itertools.islice(self.entries() if stop else (), stop))
        wanted = set(numbers.values())
        places = {number: entry.where for number, entry in entries if number in wanted}
        return {position: places[number] for position, number in numbers.items()}

    def _count_passes(self) -> list[tuple[float, int | None]]:
        """Return the number of passes over the rows of each part, which may be fractional, and of rows, if counted."""
        weights = [part.weight for part in self.parts if part.weight is not None]
        if not weights:
            return [(part.repeat, None) for part in self.parts]
        counts = [sum(1 for _ in part.source.rows()) for part in self.parts]
        # No row is repeated, so the part with the fewest rows for its weight determines the size of the mixture. Empty
        # parts are read too, which raises.
        total = min((count / weight for count, weight in zip(counts, weights, strict=True) if count), default=0)
        passes = [round(total * weight) / count if count else 1 for count, weight in zip(counts, weights, strict=True)]
        return list(zip(passes, counts, strict=True))

    def _read(self, part: Part, num_passes: float, num_rows: int | None) -> Iterator[Row | Problem]:
        drawn = self._draw(part, num_passes, num_rows)
        if num_passes < 1 and drawn and not any(drawn):
            key, value = ("repeat", part.repeat) if part.weight is None else ("weight", part.weight)
            found = f"its {key}, {value:g}, draws none of its {len(drawn):,} rows"
            raise DataError(Problem(part.source.name, found, f"raise the {key}, or remove it from the mixture"))
        for number in range(math.ceil(num_passes)):
            is_whole = number < math.floor(num_passes)
            entries = read_entries(part.source.rows(), part.source.name, part.format)
            for index, entry in enumerate(entries):
                # A file that grows has more rows than `drawn`; `verify_unchanged` raises at the end.
                is_drawn = is_whole or (index < len(drawn) and drawn[index])
                # A broken row is reported in the first pass only, whether or not it is drawn.
                if (not number) if isinstance(entry, Problem) else is_drawn:
                    yield entry

    def _draw(self, part: Part, num_passes: float, num_rows: int | None) -> Sequence[bool]:
        """Return a mask of the rows that the last, partial pass draws, a function of the part's content and the seed.

        It is empty if all passes are whole.
        """
        if num_passes and not num_passes % 1:
            return ()
        if num_rows is None:
            num_rows = sum(1 for _ in part.source.rows())
        key = hashlib.blake2b(part.source.fingerprint().encode(), digest_size=8).digest()
        # The content is part of the seed, so that sources of equal length draw different rows.
        order = np.random.default_rng([self.seed, int.from_bytes(key)]).permutation(num_rows)
        drawn = np.zeros(num_rows, dtype=np.bool_)
        drawn[order[: round(num_passes % 1 * num_rows)]] = True
        mask: list[bool] = drawn.tolist()
        return mask


def load_train_data(data: DataConfig, *, seed: int = 0) -> Mixture:
    """Open the training data: ``dataset_name``, or the entries of ``dataset_mixture``.

    Raises:
        ConfigError: As ``build_mixture``.
        DataError: A source cannot be opened.
    """
    # Only pretraining streams the sources of a mixture, and it opens them itself (`load_corpora`).
    streaming = data.dataset_streaming and data.dataset_mixture is None
    defaults = {"format": data.dataset_format, "columns": data.dataset_columns, "streaming": streaming}
    return build_mixture([{**defaults, **part} for part in list_entries(data)], seed=seed)


def load_test_data(data: DataConfig) -> Mixture | None:
    """Open the held-out data of ``dataset_test_split``; ``None`` if it is not set.

    Raises:
        ConfigError: As ``find_held_out``.
        DataError: The data cannot be opened.
    """
    entry = find_held_out(data)
    defaults = {"format": data.dataset_format, "streaming": data.dataset_streaming}
    return None if entry is None else build_mixture([{**defaults, **entry}])


def find_held_out(data: DataConfig, where: str = "dataset_test_split") -> dict[str, Any] | None:
    """Return ``dataset_test_split`` as an entry of a mixture: a split of ``dataset_name``, or a path.

    Only the spelling of the value determines which of the two it is, not whether such a file exists, so that a new file
    cannot change the held-out rows.

    Args:
        data: Configuration of the data.
        where: Location of the key, for errors.

    Raises:
        ConfigError: The value is a path that does not exist, or a split although the training data are a mixture.
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
    """Open the entries of a ``dataset_mixture``.

    Args:
        parts: Validated entries ``{name, weight, repeat, config, revision, split, format, columns}``; only ``name`` is
            required, and either all or none have a ``weight``. See ``Part`` and ``load_source``.
        seed: Seed of the rows that are drawn from a part.

    Raises:
        ConfigError: ``columns`` of an entry has a key that no layout has.
        DataError: Sources cannot be opened.
    """
    problems: list[Problem] = []
    loaded = []
    for part in parts:
        with collect_problems(problems):
            amounts = {key: part[key] for key in ("weight", "repeat", "format") if key in part}
            loaded.append(Part(source=open_entry(part), **amounts))
    raise_problems(problems, "dataset_mixture")
    return Mixture(parts=loaded, seed=seed)

"""Sources of a pretraining run, and their tokenisation to shards, which is resumable and stored once per content."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import DataConfig, DatasetFormat, RecipeConfig, TokensConfig
from recipes_lib.config.tokenization import count_ids
from recipes_lib.data.packed.encoding import (
    collect_inputs,
    encode_chunk,
    map_chunks,
    read_seed,
    show_progress,
    verify_unchanged,
)
from recipes_lib.data.sources.canonical import open_entry, read_entries
from recipes_lib.data.sources.mixtures import compute_budgets, find_held_out, list_entries
from recipes_lib.data.sources.rows import BrokenRows, Row, Source
from recipes_lib.data.sources.splits import compute_row_digest, find_distinct
from recipes_lib.data.store import PreparedSet, explain_disk_errors, make_set, raise_read_failure
from recipes_lib.data.tokens.shards import TokenWriter, is_whole
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems, raise_problems
from recipes_lib.files import read_record, replace_record

if TYPE_CHECKING:
    from recipes_lib.data.chat.encoder import RowEncoder

WITHOUT_EFFECT: Final = frozenset(
    {
        *("final_numbers.py", "prompts.py", "pairs/collator.py", "pairs/preference_sets.py"),
        *("packed/collators.py", "packed/prepared_set.py", "packed/preview.py", "packed/supervision_audit.py"),
        *("packed/training_data.py", "sources/replay_dataset.py", "tokens/dataset.py", "tokens/token_data.py"),
    }
)
"""Modules of ``data`` that do not affect the bytes of a token set, and are therefore not part of its key."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of one source.

    Attributes:
        name: Name of the source, unique in the run.
        source: The rows.
        format: Layout of the rows.
        test_size: Share or number of documents to hold out; ``None`` for none.
        seed: Seed of the choice of held-out documents.
        num_tokens: Number of training tokens after which reading stops, at the end of a document; ``None`` for no
            limit.
        tokens: Options for broken rows.
    """

    name: str
    source: Source
    format: DatasetFormat
    test_size: float | int | None = None
    seed: int = 0
    num_tokens: int | None = None
    tokens: TokensConfig = field(default_factory=TokensConfig)

    def entries(self) -> Iterator[Row | Problem]:
        """Yield the documents from the start, or a ``Problem`` in place of a broken one.

        Raises:
            DataError: The source cannot be read further; raised after the last document.
        """
        return read_entries(self.source.rows(), self.source.name, self.format, as_documents=True)

    def rows(self) -> Iterator[Row]:
        """Yield the valid documents.

        Raises:
            DataError: Too many rows are broken, or the source cannot be read further; raised after the last document.
        """
        return BrokenRows(self.tokens, is_stream=self.source.streaming).read(self.entries(), self.source.name)

    def collect_inputs(self, config: RecipeConfig) -> dict[str, Any]:
        """Return everything that determines the token set of the corpus, as JSON values; the key is their hash.

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
    """Return the configuration with only those data and token options that determine the tokens of a document."""
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
    """Open the training sources: the entries of ``dataset_mixture``, or the single dataset.

    Args:
        config: Configuration of the run.
        num_tokens: Number of tokens that the run trains on, which limits how far streams are read.

    Raises:
        ConfigError: A source is listed twice, or the number of tokens to read from a stream is unknown.
        DataError: Sources cannot be opened.
    """
    entries = list_entries(config.data)
    names = _name_entries(entries)
    budgets = compute_budgets(config, num_tokens) if config.data.dataset_streaming else [None] * len(entries)
    corpora: list[Corpus] = []
    problems: list[Problem] = []
    for entry, name, budget in zip(entries, names, budgets, strict=True):
        with collect_problems(problems):
            corpus = dataclasses.replace(
                _open(config, name, entry),
                test_size=config.data.test_split_size if config.data.dataset_test_split is None else None,
                seed=read_seed(config),
                num_tokens=budget,
            )
            corpora.append(corpus)
    raise_problems(problems, "dataset_mixture")
    return corpora


def load_held_out(config: RecipeConfig) -> Corpus | None:
    """Open the held-out source of ``dataset_test_split``; ``None`` if it is not set.

    Raises:
        ConfigError: As ``find_held_out``.
        DataError: The source cannot be opened.
    """
    where = config.locate("dataset_test_split")
    entry = find_held_out(config.data, where)
    return None if entry is None else _open(config, str(config.data.dataset_test_split), entry)


def load_eval_corpora(config: RecipeConfig) -> list[Corpus]:
    """Open the sources of ``eval_datasets``.

    Raises:
        DataError: A source cannot be opened.
    """
    return [_open(config, name, entry) for name, entry in (config.data.eval_datasets or {}).items()]


def _name_entries(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the entries, with configuration, revision and split if the name alone is not unique."""
    counts = Counter(entry["name"] for entry in entries)
    full = [":".join(filter(None, map(entry.get, ("name", "config", "revision", "split")))) for entry in entries]
    names = [name if counts[entry["name"]] > 1 else entry["name"] for entry, name in zip(entries, full, strict=True)]
    for name, count in Counter(names).items():
        if count > 1:
            found = f"`{name}` is listed {count} times"
            raise ConfigError(Problem("dataset_mixture", found, "list it once, with a higher weight"))
    return names


def _open(config: RecipeConfig, name: str, entry: Mapping[str, Any]) -> Corpus:
    defaults = {"columns": config.data.dataset_columns, "streaming": config.data.dataset_streaming}
    source = open_entry(entry, **defaults, text_documents=config.pretraining.text_documents)
    row_format = entry.get("format", config.data.dataset_format)
    return Corpus(name=name, source=source, format=row_format, tokens=config.tokens)


_ALL_DRAWS: Final = 1 << 64
"""Number of different draws of ``build_hold_out``."""


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """R tokenised documents of N tokens in total.

    Attributes:
        input_ids: Token ids of the concatenated documents, ``uint32 (N,)``.
        lengths: Number of tokens of each document, at least 1, ``int64 (R,)``.
        digests: Digest of each document's content, ``uint64 (R,)``.
        is_held_out: True for held-out documents, ``bool (R,)``.
    """

    input_ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    is_held_out: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.bool_]) -> DocumentChunk:
        """Return the documents at which ``chosen``, ``bool (R,)``, is True."""
        tokens = self.input_ids[np.repeat(chosen, self.lengths)]
        return DocumentChunk(tokens, self.lengths[chosen], self.digests[chosen], self.is_held_out[chosen])


def build_hold_out(rows: Iterable[Row], size: float | int | None, seed: int) -> Callable[[bytes], bool]:
    """Return the rule that holds out ``test_split_size`` of the documents, a function of a document's digest.

    The choice is by content, independent of the order of documents; equal documents are on the same side. Each has a
    draw, a pseudo-random number below 2**64 that is a function of its content and the seed. A size below 1 is the
    probability of each document, so that documents need not be known in advance. A size from 1 on is a number of
    distinct documents, those with the smallest draws, which requires a pass over the rows.

    Args:
        rows: The documents; read only if ``size`` is a number of them. Rows without a digest are skipped, because they
            cannot be encoded either.
        size: Share or number of documents; ``None`` to hold out nothing.
        seed: Seed of the draws.
    """
    key, threshold = seed.to_bytes(16, signed=True), int((size or 0) * _ALL_DRAWS)

    def draw(digest: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(digest, key=key, digest_size=8).digest())

    def draw_all() -> Iterator[int]:
        for row in rows:
            with suppress(DataError):
                yield draw(compute_row_digest(row))

    if size is not None and size >= 1:
        smallest = find_distinct(np.fromiter(draw_all(), np.uint64))[: int(size)].tolist()
        # One more than the largest held-out draw, because draws below the threshold are held out.
        threshold = max(smallest, default=-1) + 1
    return lambda digest: draw(digest) < threshold


def halve_digests(digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the first half of each digest, ``uint64 (R,)``: of 10 billion documents, 3 pairs collide by chance."""
    return np.frombuffer(b"".join(digests), "<u8")[::2].astype(np.uint64)


def encode_documents(
    encoder: RowEncoder, hold_out: Callable[[bytes], bool], rows: Sequence[Row], row_ids: Sequence[int]
) -> DocumentChunk:
    """Tokenise documents, and mark those that are held out.

    Args:
        encoder: Encoder of the run.
        hold_out: Rule of ``build_hold_out``.
        rows: The documents.
        row_ids: Positions of the documents in their source.

    Raises:
        DataError: As ``encode_chunk``.
    """
    examples = encode_chunk(encoder, rows, row_ids)
    input_ids, _ = examples.read()
    digests = list(map(compute_row_digest, rows))
    is_held_out = np.fromiter(map(hold_out, digests), np.bool_, len(digests))
    return DocumentChunk(input_ids, examples.lengths, halve_digests(digests), is_held_out)


logger = logging.getLogger(__name__)

PROGRESS_FILE: Final = ".progress.json"


def make_token_set(
    root: Path, key: str, inputs: Mapping[str, Any], corpus: Corpus, load_encoder: Callable[[], RowEncoder]
) -> PreparedSet:
    """Find the token set of a corpus, or build it; after an interruption, resume from the last full shard.

    Args:
        root: Folder of prepared sets.
        key: Key from ``compute_key(inputs)``.
        inputs: Inputs of the key from ``Corpus.collect_inputs``.
        corpus: The documents.
        load_encoder: Function that returns the encoder; called only to build the set.

    Raises:
        ConfigError: The tokenizer cannot be used.
        DataError: Too many rows are broken, the rows changed while they were read, or the set cannot be written.
    """

    def build(staging: Path) -> dict[str, Any]:
        encoder = load_encoder()
        with explain_disk_errors(root):
            return _write(staging, corpus, inputs["sources"]["documents"], encoder)

    prepared = make_set(root, key, inputs, build, resumes=True)
    if prepared.is_new:
        (prepared.path / PROGRESS_FILE).unlink(missing_ok=True)
    return prepared


def _write(staging: Path, corpus: Corpus, fingerprint: str, encoder: RowEncoder) -> dict[str, Any]:
    """Write the shards of both sides, resuming an earlier attempt, and return their description for the manifest."""
    hold_out = build_hold_out(BrokenRows(corpus.tokens).filter_valid(corpus.entries()), corpus.test_size, corpus.seed)
    encode = partial(encode_documents, encoder, hold_out)
    progress, writers = show_progress(corpus.name), _Sides(staging, count_ids(encoder.tokenizer), corpus.num_tokens)
    with progress as on_rows, writers as sides:
        broken = BrokenRows(corpus.tokens, is_stream=corpus.source.streaming, **sides.counts)
        on_rows(sides.num_documents, sides.num_tokens)
        # On resume, rows that have been written are read again, since sources have no random access, but not tokenised.
        entries = () if sides.are_enough else islice(corpus.entries(), broken.num_rows, None)
        for chunk in map_chunks(entries, encode, broken, corpus.tokens.dataset_num_proc):
            if broken.fatal or (broken.num_broken and not broken.are_dropped):
                continue  # The set will not be published; the remaining rows are only checked.
            sides.append(chunk, broken.count())
            on_rows(sides.num_documents, sides.num_tokens)
            if sides.are_enough:
                break
        sides.save()
        description = sides.describe()
    problems = broken.list_problems(corpus.name)
    try:
        verify_unchanged(corpus.source, fingerprint)
        raise_problems(problems, corpus.name)
    except DataError:
        if not corpus.source.streaming:
            # Other rows have another key, so this folder is useless. A stream may only have lost its connection.
            shutil.rmtree(staging, ignore_errors=True)
        raise
    _refuse_concurrent_writes(staging, description)
    for warning in broken.list_warnings(corpus.name):
        logger.warning(warning)
    return description


def _refuse_concurrent_writes(staging: Path, description: Mapping[str, Any]) -> None:
    """Raise if another process has written to the same files.

    On some cluster file systems, locks are local to a machine, so that two machines can build the same set.

    Raises:
        DataError: The files have more bytes than this process has written.
    """
    if not all(is_whole(staging / side, description[side], exactly=True) for side in ("train", "eval")):
        shutil.rmtree(staging, ignore_errors=True)
        found = "two processes have written the same set: the locks of this file system are local to a machine"
        raise DataError(Problem(str(staging.parent), found, "run `recipes prepare` on one machine first"))


class _Sides(ExitStack):
    """Writers of the training and the held-out documents, with recorded progress and a budget of training tokens."""

    def __init__(self, staging: Path, num_ids: int, budget: int | None) -> None:
        super().__init__()
        self._staging = staging
        self._budget = budget
        progress = _read_progress(staging)
        self.counts: Mapping[str, int] = progress.get("broken_rows", {})
        self._train, self._eval = (
            self.enter_context(TokenWriter(staging / side, num_ids=num_ids, at=progress.get(side)))
            for side in ("train", "eval")
        )
        self._num_saved_shards = self._num_full_shards

    @property
    def num_documents(self) -> int:
        """Documents of both sides."""
        return self._train.num_documents + self._eval.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides."""
        return self._train.num_tokens + self._eval.num_tokens

    @property
    def are_enough(self) -> bool:
        """Whether the budget of training tokens is reached."""
        return self._budget is not None and self._train.num_tokens >= self._budget

    @property
    def _num_full_shards(self) -> int:
        return self._train.num_full_shards + self._eval.num_full_shards

    def append(self, chunk: DocumentChunk, counts: Mapping[str, int]) -> None:
        """Write documents up to the one that reaches the budget, and record the progress after every full shard.

        Args:
            chunk: The documents.
            counts: Row counts up to the end of the chunk, from ``BrokenRows.count``.
        """
        if self._budget is not None:
            # Held-out documents do not count; the document that reaches the budget is included.
            ends = self._train.num_tokens + np.cumsum(np.where(chunk.is_held_out, 0, chunk.lengths))
            chunk = chunk.take(np.arange(len(ends)) <= ends.searchsorted(self._budget))
        for writer, chosen in ((self._train, ~chunk.is_held_out), (self._eval, chunk.is_held_out)):
            side = chunk.take(chosen)
            writer.append(side.input_ids, side.lengths, side.digests)
        self.counts = counts
        if self._num_full_shards > self._num_saved_shards:
            self.save()

    def save(self) -> None:
        """Record the current position as the one from which a later attempt resumes."""
        # The record is written last, since it must not describe bytes that are not on disk.
        self._train.flush()
        self._eval.flush()
        replace_record(self._staging / PROGRESS_FILE, self.describe())
        self._num_saved_shards = self._num_full_shards

    def describe(self) -> dict[str, Any]:
        """Return the description of both sides, and the row counts, as JSON values."""
        return {"train": self._train.describe(), "eval": self._eval.describe(), "broken_rows": self.counts}


def _read_progress(staging: Path) -> dict[str, Any]:
    """Return the last recorded progress; without a valid one, empty the folder and return an empty dictionary.

    Raises:
        OSError: The progress exists but cannot be read.
    """
    try:
        progress = read_record(staging / PROGRESS_FILE, {"train": dict, "eval": dict})
        if is_whole(staging / "train", progress["train"]) and is_whole(staging / "eval", progress["eval"]):
            return progress
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise_read_failure(error)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return {}

"""The tokens of one source as a prepared set: found by content, or written shard by shard, and resumed when killed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from recipes_lib.data.broken_rows import BrokenRows
from recipes_lib.data.store import (
    PreparedSet,
    choose_staging,
    explain_disk_errors,
    find_set,
    hold_lock,
    publish_set,
)
from recipes_lib.data.token_documents import DocumentChunk, build_hold_out, encode_documents
from recipes_lib.data.token_shards import TokenSource, TokenWriter, is_whole
from recipes_lib.data.token_sources import Corpus
from recipes_lib.errors import DataError, Problem, raise_problems
from recipes_lib.files import read_record, replace_record

if TYPE_CHECKING:
    from recipes_lib.data.chat import RowEncoder

logger = logging.getLogger(__name__)

Side = Literal["train", "eval"]

PROGRESS_FILE: Final = ".progress.json"


def open_side(prepared: PreparedSet, side: Side, name: str) -> TokenSource:
    """The documents of a token set that are trained on, or those held out."""
    return TokenSource(name, prepared.path / side, **prepared.manifest[side])


def make_token_set(
    root: Path,
    key: str,
    inputs: Mapping[str, Any],
    corpus: Corpus,
    load_encoder: Callable[[], tuple[RowEncoder, int]],
    on_documents: Callable[[int, int], None],
) -> PreparedSet:
    """Finds the token set of a corpus, or makes it; whoever is killed goes on behind the last full shard.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.
        inputs: What went into it, from ``Corpus.collect_inputs``.
        corpus: The documents.
        load_encoder: Gives the encoder and how many ids its tokenizer has; called only when a set has to be made.
        on_documents: Told how many documents and tokens have been written, after each chunk.

    Raises:
        ConfigError: The tokenizer cannot be used.
        DataError: Rows are broken, each named up to twenty; or the set cannot be written.
    """
    if found := find_set(root, key):
        return found
    with hold_lock(root, key) as is_locked:
        if found := find_set(root, key):  # made by the process that held the lock before
            return found
        encoder, num_ids = load_encoder()
        staging = choose_staging(root, key, is_kept=is_locked)
        try:
            with explain_disk_errors(root):
                manifest = _write(staging, corpus, encoder, num_ids, on_documents)
                published = publish_set(staging, root, key, {"key": key, "inputs": inputs, **manifest})
                (published.path / PROGRESS_FILE).unlink(missing_ok=True)
                return published
        finally:
            if not is_locked:
                shutil.rmtree(staging, ignore_errors=True)


def _write(
    staging: Path, corpus: Corpus, encoder: RowEncoder, num_ids: int, on_documents: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the shards of both sides, from where an earlier attempt got to, and returns what is in them."""
    hold_out = build_hold_out(BrokenRows(corpus.tokens).take(corpus.entries()), corpus.test_size, corpus.seed)
    with _Sides(staging, num_ids, corpus.num_tokens) as sides:
        broken = BrokenRows(corpus.tokens, is_stream=corpus.source.streaming, **sides.counts)
        on_documents(sides.num_documents, sides.num_tokens)
        # What is on the disk already is read again, since rows have no other place, but not tokenised.
        entries = () if sides.are_enough else islice(corpus.entries(), broken.num_rows, None)
        for chunk in encode_documents(encoder, entries, hold_out, broken):
            if broken.refused or (broken.num_broken and not broken.are_dropped):
                continue
            sides.append(chunk, broken.count())
            on_documents(sides.num_documents, sides.num_tokens)
            if sides.are_enough:
                break
        sides.save()
        description = sides.describe()
    problems = broken.judge(corpus.name)
    if problems and not corpus.source.streaming:
        shutil.rmtree(staging, ignore_errors=True)  # mended rows have another key; a stream may only have broken off
    raise_problems(problems, corpus.name)
    _refuse_intruders(staging, description)
    for told in broken.tell(corpus.name):
        logger.warning(told)
    return description


def _refuse_intruders(staging: Path, description: Mapping[str, Any]) -> None:
    """Some cluster file systems grant one lock on every machine; then two processes write one file.

    Raises:
        DataError: There is more in the files than was written.
    """
    if not all(is_whole(staging / side, description[side], exactly=True) for side in ("train", "eval")):
        shutil.rmtree(staging, ignore_errors=True)
        found = "two processes have written the same set: the locks of this file system end at a machine"
        raise DataError(Problem(str(staging.parent), found, "run `recipes prepare` on one machine first"))


class _Sides:
    """What is trained on and what is held out, written side by side up to a number of training tokens."""

    def __init__(self, staging: Path, num_ids: int, budget: int | None) -> None:
        self._staging = staging
        self._budget = budget
        progress = _read_progress(staging)
        self.counts: Mapping[str, int] = progress.get("broken_rows", {})
        self._train = TokenWriter(staging / "train", num_ids=num_ids, at=progress.get("train"))
        self._eval = TokenWriter(staging / "eval", num_ids=num_ids, at=progress.get("eval"))
        self._num_saved_shards = self._num_full_shards

    def __enter__(self) -> _Sides:
        return self

    def __exit__(self, *_: object) -> None:
        with self._train, self._eval:
            pass

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
        """Whether there are as many training tokens as were asked for."""
        return self._budget is not None and self._train.num_tokens >= self._budget

    @property
    def _num_full_shards(self) -> int:
        return self._train.num_full_shards + self._eval.num_full_shards

    def append(self, chunk: DocumentChunk, counts: Mapping[str, int]) -> None:
        """Writes documents up to the one that makes them enough; what they filled a shard with is kept from then on.

        Args:
            chunk: The documents.
            counts: From ``BrokenRows.count``: the rows up to the end of the chunk.
        """
        if self._budget is not None:
            ends = self._train.num_tokens + np.cumsum(np.where(chunk.is_held_out, 0, chunk.lengths))
            chunk = chunk.take(np.arange(len(ends)) <= ends.searchsorted(self._budget))
        for writer, side in (
            (self._train, chunk.take(~chunk.is_held_out)),
            (self._eval, chunk.take(chunk.is_held_out)),
        ):
            writer.append(side.input_ids, side.lengths, side.digests)
        self.counts = counts
        if self._num_full_shards > self._num_saved_shards:
            self.save()

    def save(self) -> None:
        """Makes what was written the place from which a later attempt goes on."""
        self._train.flush()
        self._eval.flush()
        replace_record(self._staging / PROGRESS_FILE, self.describe())
        self._num_saved_shards = self._num_full_shards

    def describe(self) -> dict[str, Any]:
        """What is on each side, and of how many rows, as JSON values."""
        return {"train": self._train.describe(), "eval": self._eval.describe(), "broken_rows": self.counts}


def _read_progress(staging: Path) -> dict[str, Any]:
    """What the last ``save`` said; nothing, in an empty folder, when that is not all there."""
    with suppress(DataError, KeyError, TypeError, ValueError):
        progress = read_record(staging / PROGRESS_FILE, {"train": dict, "eval": dict})
        if is_whole(staging / "train", progress["train"]) and is_whole(staging / "eval", progress["eval"]):
            return progress
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return {}

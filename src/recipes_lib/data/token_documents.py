"""Rows to documents of tokens, chunk after chunk, and which of them are held out."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.data.broken_rows import BrokenRows, encode_sound
from recipes_lib.data.encoding import ROWS_PER_CHUNK, encode_chunk
from recipes_lib.data.rows import Row
from recipes_lib.data.splits import compute_row_digest
from recipes_lib.errors import DataError, Problem

if TYPE_CHECKING:
    from recipes_lib.data.chat import RowEncoder

CHARACTERS_PER_CHUNK: Final = 1 << 21
"""A chunk is closed when it has so many characters, so that memory does not grow with the length of documents."""

_THREADS: Final = 2
_ALL_DRAWS: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """Some documents as tokens, R documents of N tokens in all.

    Attributes:
        input_ids: ``uint32 (N,)``, documents end to end.
        lengths: Tokens of each document, ``int64 (R,)``, at least 1.
        digests: ``uint64 (R,)``; equal for documents that say the same.
        is_held_out: ``bool (R,)``; True where the document is held out.
    """

    input_ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    is_held_out: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.bool_]) -> DocumentChunk:
        """The documents where ``chosen``, ``bool (R,)``, is True."""
        if chosen.all():
            return self
        tokens = self.input_ids[np.repeat(chosen, self.lengths)]
        return DocumentChunk(tokens, self.lengths[chosen], self.digests[chosen], self.is_held_out[chosen])


@dataclass(frozen=True, slots=True)
class HoldOut:
    """Holds documents out by what they say, whatever their order, so that equal ones stay together.

    Each document has a draw, a number below 2**64 that follows from its content and the seed.

    Attributes:
        seed: Decides the draws.
        threshold: Documents with draws below it are held out.
    """

    seed: int = 0
    threshold: int = 0

    def draw(self, digest: bytes) -> int:
        """The draw of the document with that digest."""
        key = self.seed.to_bytes(16, signed=True)
        return int.from_bytes(hashlib.blake2b(digest, key=key, digest_size=8).digest())

    def holds(self, digest: bytes) -> bool:
        """Whether the document with that digest, from ``compute_row_digest``, is held out."""
        return self.threshold > 0 and self.draw(digest) < self.threshold


def build_hold_out(rows: Iterable[Row], size: float | int | None, seed: int) -> HoldOut:
    """The rule that holds ``test_split_size`` of the documents out.

    Below 1 it is the chance of each document, so that no document has to be known beforehand. From 1 on it is a number
    of documents that differ: those with the smallest draws, each with all its copies, for which ``rows`` is read.

    Args:
        rows: The documents; read only for a number of them.
        size: A share, a number, or ``None`` to hold nothing out.
        seed: Decides which documents are held out.

    A row that cannot be digested is passed over: it cannot be encoded either.
    """
    if size is None:
        return HoldOut()
    if size < 1:
        return HoldOut(seed, int(size * _ALL_DRAWS))
    draw = HoldOut(seed).draw
    smallest: list[int] = []  # a heap of negated draws: its first is the largest of them
    known: set[int] = set()
    for row in rows:
        try:
            drawn = draw(compute_row_digest(row))
        except DataError:
            continue
        if drawn in known or (len(known) == size and drawn > -smallest[0]):
            continue
        known.add(drawn)
        if len(known) > size:
            known.remove(-heapq.heappushpop(smallest, -drawn))
        else:
            heapq.heappush(smallest, -drawn)
    return HoldOut(seed, max(known, default=-1) + 1)


def halve_digests(digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """The first half of each digest, ``uint64 (R,)``: among 10 billion documents, 3 pairs are equal by chance."""
    return np.frombuffer(b"".join(digests), "<u8")[::2].astype(np.uint64)


def encode_documents(
    encoder: RowEncoder, entries: Iterable[Row | Problem], hold_out: HoldOut, broken: BrokenRows
) -> Iterator[DocumentChunk]:
    """Tokens of the sound rows, in order.

    While chunks are in the tokenizer, which frees the interpreter, others are read.

    Args:
        encoder: Tokenises whole rows.
        entries: The documents.
        hold_out: Which of them are held out.
        broken: Told of every row of the chunks up to the one that is yielded, and of what is wrong.
    """

    def encode(chunk: Sequence[Row], row_ids: Sequence[int]) -> DocumentChunk:
        examples = encode_chunk(encoder, chunk, row_ids)
        digests = [compute_row_digest(row) for row in chunk]
        is_held_out = np.fromiter(map(hold_out.holds, digests), np.bool_, len(digests))
        return DocumentChunk(examples.input_ids, examples.lengths, halve_digests(digests), is_held_out)

    with ThreadPoolExecutor(_THREADS) as pool:
        pending: deque[tuple[int, Future[tuple[DocumentChunk | None, list[Problem]]]]] = deque()
        chunks = _split_chunks(broken.skim(entries), broken)
        while not broken.are_hopeless:
            for chunk in islice(chunks, _THREADS + 1 - len(pending)):
                pending.append((len(chunk), pool.submit(encode_sound, encode, chunk, 0, drop=broken.are_dropped)))
            if not pending:
                return
            num_rows, future = pending.popleft()
            documents, problems = future.result()
            broken.add(num_rows, problems)
            if documents is not None:
                yield documents


def _split_chunks(entries: Iterable[Row | Problem], broken: BrokenRows) -> Iterator[list[Row | Problem]]:
    chunk: list[Row | Problem] = []
    num_characters = 0
    try:
        for entry in entries:
            chunk.append(entry)
            num_characters += _count_characters(entry) if isinstance(entry, Row) else 0
            if len(chunk) == ROWS_PER_CHUNK or num_characters >= CHARACTERS_PER_CHUNK:
                yield chunk
                chunk, num_characters = [], 0
    except DataError as error:
        broken.refused += error.problems
    if chunk:
        yield chunk


def _count_characters(row: Row) -> int:
    """Characters of what a row says, markup aside."""
    if row.messages is not None:
        return sum(len(str(message.get("content", ""))) for message in row.messages)
    return len(row.text or "") + len(row.prompt or "") + len(row.completion or "")

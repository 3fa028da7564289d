"""Tokenisation of a whole mixture, chunk by chunk, with every broken row reported at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.chat.remarks import Remarked
from recipes_lib.data.packed.keys import read_chat_template
from recipes_lib.data.packed.packing import Examples, build_examples, concatenate_examples
from recipes_lib.data.sources.broken_rows import BrokenRows, encode_sound
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import Row
from recipes_lib.data.sources.splits import compute_row_digest
from recipes_lib.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.chat.encoder import RowEncoder

TokenizerLoader = Callable[[RecipeConfig], "PreTrainedTokenizerBase"]
"""Loads the run's tokenizer; handed in, since loading models and tokenizers is not this room's work."""

ROWS_PER_CHUNK: Final = 500
"""Rows tokenised together; also the window in which a stream is shuffled and packed."""

_THREADS: Final = 2

Chunk = TypeVar("Chunk")


@dataclass(frozen=True, slots=True)
class EncodedMixture:
    """The rows of a mixture: where they stand, what they say, and as tokens.

    Attributes:
        mixture: What they were read from; ``examples.row_ids`` are positions in it.
        examples: The tokens.
        digests: From ``compute_row_digest``, one for each example.
    """

    mixture: Mixture
    examples: Examples
    digests: Sequence[bytes]

    @property
    def num_duplicates(self) -> int:
        """Rows that say what an earlier one says."""
        return len(self.digests) - len(set(self.digests))

    def take(self, positions: npt.NDArray[np.int64]) -> EncodedMixture:
        """The rows at these positions, in that order."""
        return EncodedMixture(self.mixture, self.examples.take(positions), [self.digests[at] for at in positions])

    def find_target_positions(self, positions: Collection[int]) -> dict[int, str]:
        """The places of these rows as errors name them; reads the mixture again."""
        row_ids = {int(self.examples.row_ids[at]): at for at in positions}
        return {row_ids[row_id]: place for row_id, place in find_target_positions(self.mixture, row_ids).items()}


def find_target_positions(mixture: Mixture, row_ids: Collection[int]) -> dict[int, str]:
    """The places of rows as errors name them, by their position in the mixture, which is read again."""
    places: dict[int, str] = {}
    for row_id, entry in enumerate(mixture.entries()):
        if row_id in row_ids:
            places[row_id] = entry.where
        if len(places) == len(row_ids):
            break
    return places


def read_seed(config: RecipeConfig) -> int:
    """The run's seed, which decides what is held out, drawn and shuffled."""
    # Unset it is 0, and not upstream's 42: prepared sets of before would be drawn anew.
    return int(config.training.get("seed") or 0)


def build_encoder(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
    """The encoder of a run.

    Raises:
        ConfigError: The tokenizer is not a fast one or has no such ``eos_token``, or the chat template cannot be read.
    """
    from recipes_lib.data.chat.encoder import RowEncoder  # brings transformers, which finding a set does not need

    tokens, template = config.tokens, read_chat_template(config)
    return RowEncoder(tokenizer, loss_on=tokens.loss_on, chat_template=template, eos_token=tokens.eos_token)


def split_chunks(entries: Iterable[Row | Problem]) -> Iterator[list[Row | Problem]]:
    """Entries by ``ROWS_PER_CHUNK``, the last chunk shorter; an error of reading comes after those that were read."""
    chunk: list[Row | Problem] = []
    try:
        for entry in entries:
            chunk.append(entry)
            if len(chunk) == ROWS_PER_CHUNK:
                yield chunk
                chunk = []
    except DataError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def encode_chunk(encoder: RowEncoder, rows: Sequence[Row], row_ids: Sequence[int]) -> Examples:
    """Tokens of some rows.

    Args:
        encoder: From ``build_encoder``.
        rows: The rows.
        row_ids: Their positions in their mixture.

    Raises:
        DataError: Rows that cannot be tokenised or masked, or give no token.
    """
    encoded = encoder.encode(rows)
    empty = [row for row, tokens in zip(rows, encoded, strict=True) if not len(tokens.input_ids)]
    if empty:
        raise DataError(*(Problem(row.where, "the row gives no token", "remove it") for row in empty))
    examples = build_examples(encoded, row_ids)
    remarked = [
        Remarked(number, row.where, tokens.remarks)
        for number, row, tokens in zip(row_ids, rows, encoded, strict=True)
        if tokens.remarks
    ]
    return replace(examples, remarked=remarked)


def encode_mixture(
    encoder: RowEncoder, mixture: Mixture, broken: BrokenRows, on_rows: Callable[[int], None]
) -> EncodedMixture:
    """Tokens of all rows that are sound.

    Args:
        encoder: From ``build_encoder``.
        mixture: The rows.
        broken: Counts the others; whoever calls judges them.
        on_rows: Told the number of rows of each chunk that is done.
    """
    parts: list[Examples] = [build_examples([], [])]
    digests: list[bytes] = []

    def encode(rows: Sequence[Row], row_ids: Sequence[int]) -> tuple[Examples, list[bytes]]:
        return encode_chunk(encoder, rows, row_ids), [compute_row_digest(row) for row in rows]

    for examples, chunk_digests in map_chunks(mixture, encode, broken):
        parts.append(examples)
        digests.extend(chunk_digests)
        on_rows(len(chunk_digests))
    return EncodedMixture(mixture, concatenate_examples(parts), digests)


def map_chunks(
    mixture: Mixture, encode: Callable[[Sequence[Row], Sequence[int]], Chunk], broken: BrokenRows
) -> Iterator[Chunk]:
    """Yields what becomes of each chunk of rows, in order, without the broken ones.

    While chunks are in the tokenizer, which frees the interpreter, others are read and masked.

    Args:
        mixture: The rows.
        encode: Takes the rows of a chunk and their numbers; called by several threads.
        broken: Told of every row, and of what is wrong.
    """
    pending: deque[tuple[int, Future[tuple[Chunk | None, list[Problem]]]]] = deque()

    def collect() -> Iterator[Chunk]:
        num_rows, future = pending.popleft()
        chunk, problems = future.result()
        broken.add(num_rows, problems)
        if chunk is not None:
            yield chunk

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for number, entries in enumerate(split_chunks(broken.skim(mixture.entries()))):
                first = number * ROWS_PER_CHUNK
                task = pool.submit(encode_sound, encode, entries, first, drop=broken.are_dropped)
                pending.append((len(entries), task))
                if len(pending) > _THREADS:
                    yield from collect()
        except DataError as error:
            broken.refused += error.problems
        while pending:
            yield from collect()

"""Truncation and sequence packing as pure array functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import Overlong
from recipes_lib.data.sources.rows import EncodedRow, RemarkBits, build_bits
from recipes_lib.data.sources.splits import find_distinct

IntArray = npt.NDArray[np.int64]


TARGET: Final = np.uint32(1 << 31)
"""Bit of a stored token that marks a target. Ids are smaller, so that a token and its mask take 4 bytes."""

_TOKENS_AT_ONCE: Final = 1 << 22


class Tokens(Protocol):
    """Tokens of many examples, ``uint32``, with the bit ``TARGET`` set at targets: an array or a file."""

    def __getitem__(self, span: slice, /) -> npt.NDArray[np.uint32]:
        """Return tokens ``span.start:span.stop``."""


@dataclass(frozen=True, slots=True)
class Examples:
    """R tokenised examples, each a span of ``tokens``; selecting, ordering and splitting them copies no tokens.

    Attributes:
        tokens: Tokens of all examples.
        starts: First token of each example, ``int64 (R,)``.
        lengths: Number of tokens of each example, at least 1, ``int64 (R,)``.
        row_ids: Position of each example's row in its mixture, ``int64 (R,)``; equal for the pieces of a split row.
        num_targets: Number of target tokens of each example, ``int64 (R,)``.
        remarks: Remarks on each example's row, ``uint16 (R,)``.
    """

    tokens: Tokens
    starts: IntArray
    lengths: IntArray
    row_ids: IntArray
    num_targets: IntArray
    remarks: RemarkBits

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, chosen: IntArray | slice = slice(None)) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return ids, ``uint32 (N,)``, and loss mask, ``bool (N,)``, of chosen or all examples, concatenated in order.

        The mask is True at targets, and False at the first token of every example, which no token predicts.
        """
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        # Each run of adjacent examples is one read, which matters if the tokens are in a file.
        is_first = np.ones(len(starts) + 1, np.bool_)
        is_first[1:-1] = starts[1:] != starts[:-1] + lengths[:-1]
        boundaries = np.flatnonzero(is_first)
        stops = (starts + lengths)[boundaries[1:] - 1]
        spans = zip(starts[boundaries[:-1]].tolist(), stops.tolist(), strict=True)
        tokens = np.concatenate([np.zeros(0, np.uint32), *(self.tokens[start:stop] for start, stop in spans)])
        loss_mask = tokens >= TARGET
        loss_mask[_exclusive_sum(lengths)] = False
        tokens &= ~TARGET
        return tokens, loss_mask

    def take(self, indices: npt.NDArray[np.integer]) -> Examples:
        """Return the examples at ``indices``, ``(K,)``, in that order."""
        return Examples(self.tokens, *(column[indices] for column in self.columns))

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All fields other than ``tokens``, in the order of the constructor."""
        return self.starts, self.lengths, self.row_ids, self.num_targets, self.remarks


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """Counts of ``fit_to_length``.

    Attributes:
        num_overlong: Rows longer than the capacity.
        num_without_target: Rows (or pieces) dropped because they have no target, before or after truncation.
        num_lost_rows: Rows that are dropped entirely.
        num_lost_tokens: Dropped tokens.
        num_lost_targets: Dropped target tokens, including the first token of each piece of a split row but the first.
        num_targets: Target tokens before truncation.
    """

    num_overlong: int
    num_without_target: int
    num_lost_rows: int
    num_lost_tokens: int
    num_lost_targets: int
    num_targets: int

    @property
    def lost_fraction(self) -> float:
        """Share of lost target tokens, from 0 to 1."""
        return self.num_lost_targets / max(1, self.num_targets)


@dataclass(frozen=True, slots=True)
class Bins:
    """Assignment of examples to packs.

    Attributes:
        order: Indices of the examples, bin after bin, ``int64 (R,)``.
        offsets: Start of each bin in ``order``, ``int64 (num_bins + 1,)``: bin ``k`` is
            ``order[offsets[k]:offsets[k + 1]]``.
    """

    order: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def split_blocks(lengths: IntArray) -> Iterator[slice]:
    """Yield slices of rows with about 4 million tokens each, so that reading all of them has bounded memory.

    Args:
        lengths: Number of tokens of each row, ``int64 (R,)``.
    """
    blocks = np.cumsum(lengths) // _TOKENS_AT_ONCE
    boundaries = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(lengths)]
    return map(slice, boundaries[:-1], boundaries[1:])


def build_examples(rows: Sequence[EncodedRow], row_ids: npt.ArrayLike) -> Examples:
    """Concatenate encoded rows to examples.

    Args:
        rows: Encoded rows of at least one token each; position 0 does not count as a target.
        row_ids: Positions of the rows in their mixture, ``int (len(rows),)``.
    """
    lengths = np.fromiter((len(row.input_ids) for row in rows), np.int64, len(rows))
    tokens = np.concatenate([np.zeros(0, np.uint32), *(row.input_ids for row in rows)])
    is_target = np.concatenate([np.zeros(0, np.bool_), *(row.loss_mask for row in rows)])
    np.bitwise_or(tokens, TARGET, out=tokens, where=is_target)
    remarks, no_targets = build_bits(row.remarks for row in rows), np.zeros_like(lengths)
    examples = Examples(tokens, _exclusive_sum(lengths), lengths, np.asarray(row_ids, np.int64), no_targets, remarks)
    return replace(examples, num_targets=count_targets(examples))


def concatenate_examples(parts: Sequence[Examples]) -> Examples:
    """Concatenate one or more ``Examples`` that have the same ``tokens``."""
    columns = zip(*(part.columns for part in parts), strict=True)
    return Examples(parts[0].tokens, *map(np.concatenate, columns))


def count_targets(examples: Examples) -> IntArray:
    """Count the targets of each example in its tokens, ``int64 (R,)``."""
    # `reduceat` is wrong for empty segments, which do not occur: every example has a token.
    counts = [
        np.add.reduceat(examples.read(block)[1], _exclusive_sum(examples.lengths[block]), dtype=np.int64)
        for block in split_blocks(examples.lengths)
    ]
    return np.concatenate(counts)


def fit_to_length(examples: Examples, capacity: int, overlong: Overlong) -> tuple[Examples, LengthCounts]:
    """Limit every example to ``capacity`` tokens, and drop examples without a target.

    Args:
        examples: The examples; not modified.
        capacity: Maximum number of tokens, at least 2.
        overlong: Handling of longer examples. ``truncate`` keeps the start; ``drop`` drops them; ``split`` makes pieces
            of ``capacity`` tokens, each a separate document; ``error`` leaves them, because the caller raises.

    Returns:
        The remaining examples, in order, and counts of what was lost.
    """
    too_long = examples.lengths > capacity
    fitted = examples
    if overlong == "drop":
        fitted = examples.take(np.flatnonzero(~too_long))
    elif overlong != "error":
        fitted = _cut(examples, capacity, splits=overlong == "split")
    with_target = fitted.num_targets > 0
    left = fitted.take(np.flatnonzero(with_target))
    num_targets = int(examples.num_targets.sum())
    return left, LengthCounts(
        num_overlong=int(too_long.sum()),
        num_without_target=int((~with_target).sum()),
        num_lost_rows=len(examples) - len(find_distinct(left.row_ids)),
        num_lost_tokens=int(examples.lengths.sum() - left.lengths.sum()),
        num_lost_targets=num_targets - int(left.num_targets.sum()),
        num_targets=num_targets,
    )


def pack_best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Bins:
    """Pack examples into bins of ``capacity`` tokens by best-fit decreasing over the whole set.

    In order of decreasing length, each example is placed in the bin with the least remaining space that fits it.
    Examples of equal length are placed together, as many as the bin has space for, which gives the same packing: a
    million examples take well under a second.

    Args:
        lengths: Number of tokens of each example, from 1 to ``capacity``, ``int (R,)``.
        capacity: Number of tokens of a bin.

    Returns:
        Bins in the order of their first example; within a bin, examples are in the order of the input.

    Source: best-fit decreasing (Johnson 1974); the loads equal TRL's ``bfd`` over one batch,
    ``tests/data/packed/test_packing.py``.
    """
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bin_of = np.empty(len(lengths), np.int64)
    bins_with_space: dict[int, list[int]] = defaultdict(list)
    occupied = 0  # Bit s is set if a bin has exactly s tokens of space left.
    num_bins = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            fitting = occupied >> length
            # The lowest set bit of `fitting` is the bin with the least sufficient space; without any, open a new bin.
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            # Fill the bin with examples of this length, then further bins with the same space, all in one step.
            each = min(space // length, end - placed)
            num_taken = (end - placed) // each
            if fitting:
                candidates = bins_with_space[space]
                taken = candidates[-num_taken:]
                del candidates[-num_taken:]
                # Clear the bit if this was the last bin with that space.
                occupied ^= 0 if candidates else 1 << space
            else:
                taken = list(range(num_bins, num_bins + num_taken))
                num_bins += num_taken
            num_placed = len(taken) * each
            bin_of[by_length[placed : placed + num_placed]] = np.repeat(taken, each)
            placed += num_placed
            if space_left := space - each * length:
                bins_with_space[space_left].extend(taken)
                occupied |= 1 << space_left
    return _group(bin_of, num_bins)


def choose_bins(lengths: npt.NDArray[np.integer], capacity: int, *, packing: bool) -> Bins:
    """Return the bins of ``pack_best_fit``; without packing, one bin per example, in order."""
    if packing:
        return pack_best_fit(lengths, capacity)
    return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _group(bin_of: IntArray, num_bins: int) -> Bins:
    """Return bins from the bin number of each example, renumbered in the order of their first example."""
    first = np.full(num_bins, len(bin_of), np.int64)
    # `minimum.at` is unbuffered; an indexed assignment would keep the last example of each bin instead of the first.
    np.minimum.at(first, bin_of, np.arange(len(bin_of)))
    order = np.argsort(first[bin_of], kind="stable")
    counts = np.bincount(bin_of, minlength=num_bins)[np.argsort(first)]
    return Bins(order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _cut(examples: Examples, capacity: int, *, splits: bool) -> Examples:
    """Split examples into pieces of at most ``capacity`` tokens, or keep only the first piece of each."""
    num_pieces = -(-examples.lengths // capacity) if splits else np.ones_like(examples.lengths)
    whole = np.repeat(np.arange(len(examples)), num_pieces)
    # Tokens of the example before each piece.
    offsets = capacity * (np.arange(len(whole)) - np.repeat(_exclusive_sum(num_pieces), num_pieces))
    pieces = examples.take(whole)
    is_cut = np.flatnonzero(pieces.lengths > capacity)
    lengths = np.minimum(pieces.lengths - offsets, capacity)
    pieces = replace(pieces, starts=pieces.starts + offsets, lengths=lengths)
    # Counted again, because the first token of a piece is never a target. `take` has copied, so writing is safe.
    pieces.num_targets[is_cut] = count_targets(pieces.take(is_cut))
    return pieces


def _exclusive_sum(lengths: IntArray) -> IntArray:
    return np.cumsum(lengths) - lengths

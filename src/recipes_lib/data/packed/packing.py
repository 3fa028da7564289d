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

IntArray = npt.NDArray[np.int64]


TARGET: Final = np.uint32(1 << 31)
"""Flag of a stored token that is a target. Ids stay below it, so that a token and its mask are 4 bytes."""

_TOKENS_AT_ONCE: Final = 1 << 22


class Tokens(Protocol):
    """Tokens of many examples, ``uint32``, with ``TARGET`` set where one is a target: an array, or a file."""

    def __getitem__(self, span: slice, /) -> npt.NDArray[np.uint32]:
        """Tokens ``span.start:span.stop``."""


@dataclass(frozen=True, slots=True)
class Examples:
    """R tokenised examples, each a span of ``tokens``; selecting, ordering and splitting them copies no token.

    Attributes:
        tokens: Where their tokens are.
        starts: ``int64 (R,)``; first token of each example.
        lengths: ``int64 (R,)``; tokens of each example, at least 1.
        row_ids: ``int64 (R,)``; position of each example's row in its source. Pieces of a split row share it.
        num_targets: ``int64 (R,)``; target tokens of each example.
        remarks: ``uint8 (R,)``; what an audit should tell of each example's row.
    """

    tokens: Tokens
    starts: IntArray
    lengths: IntArray
    row_ids: IntArray
    num_targets: IntArray
    remarks: RemarkBits

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def input_ids(self) -> npt.NDArray[np.uint32]:
        """Concatenated token ids of all examples, ``uint32 (N,)``."""
        return self.read()[0]

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """``bool (N,)``; True where the token is a target."""
        return self.read()[1]

    def read(self, chosen: IntArray | slice = slice(None)) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return ids, ``uint32 (N,)``, and loss mask, ``bool (N,)``, of the chosen examples, concatenated in order.

        The mask is True at targets, and False at the first token of every example, which has no prediction.
        """
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        # Adjacent examples are read at once.
        is_first = np.ones(len(starts) + 1, np.bool_)
        is_first[1:-1] = starts[1:] != starts[:-1] + lengths[:-1]
        borders = np.flatnonzero(is_first)
        stops = (starts + lengths)[borders[1:] - 1]
        spans = zip(starts[borders[:-1]].tolist(), stops.tolist(), strict=True)
        tokens = np.concatenate([np.zeros(0, np.uint32), *(self.tokens[start:stop] for start, stop in spans)])
        loss_mask = tokens >= TARGET
        loss_mask[_exclusive_sum(lengths)] = False
        return tokens & ~TARGET, loss_mask

    def iterate_blocks(self) -> Iterator[slice]:
        """Yield spans of examples with about 4 million tokens together, so that reading them needs bounded memory."""
        blocks = np.cumsum(self.lengths) // _TOKENS_AT_ONCE
        borders = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(self)]
        return map(slice, borders[:-1], borders[1:])

    def take(self, indices: npt.NDArray[np.integer]) -> Examples:
        """The examples at ``indices``, ``(K,)``, in that order."""
        return Examples(self.tokens, *(column[indices] for column in self.columns))

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """What there is to know of each example; all fields but ``tokens``."""
        return self.starts, self.lengths, self.row_ids, self.num_targets, self.remarks


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """Counts of ``fit_to_length``; ``lost`` counts targets that are no longer trained on.

    Attributes:
        num_overlong: Rows longer than the capacity.
        num_without_target: Rows (or pieces) dropped since they hold no target: found so, or left so by the cut.
        num_lost_rows: Rows of which nothing is left.
        num_lost_tokens: Tokens that are gone.
        num_lost_targets: Target tokens that are gone, the first token of each further piece among them.
        num_targets: Target tokens before.
    """

    num_overlong: int
    num_without_target: int
    num_lost_rows: int
    num_lost_tokens: int
    num_lost_targets: int
    num_targets: int

    @property
    def lost_fraction(self) -> float:
        """Share of lost targets, 0 to 1."""
        return self.num_lost_targets / max(1, self.num_targets)


@dataclass(frozen=True, slots=True)
class Bins:
    """Assignment of examples to rows of the batch.

    Attributes:
        order: ``int64 (R,)``; indices of the examples, bin after bin.
        offsets: ``int64 (num_bins + 1,)``; bin ``k`` is ``order[offsets[k]:offsets[k + 1]]``.
    """

    order: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def build_examples(rows: Sequence[EncodedRow], row_ids: npt.ArrayLike) -> Examples:
    """Concatenate encoded rows to examples.

    Args:
        rows: Encoded rows of at least one token each; a target at position 0 is cleared.
        row_ids: ``int (len(rows),)``.
    """
    lengths = np.fromiter((len(row.input_ids) for row in rows), np.int64, len(rows))
    assert lengths.all(), "a row without tokens"
    ids = np.concatenate([np.zeros(0, np.uint32), *(row.input_ids for row in rows)])
    is_target = np.concatenate([np.zeros(0, np.bool_), *(row.loss_mask for row in rows)])
    tokens = np.where(is_target, ids | TARGET, ids)
    remarks, no_targets = build_bits(row.remarks for row in rows), np.zeros_like(lengths)
    examples = Examples(tokens, _exclusive_sum(lengths), lengths, np.asarray(row_ids, np.int64), no_targets, remarks)
    return replace(examples, num_targets=count_targets(examples))


def concatenate_examples(parts: Sequence[Examples]) -> Examples:
    """Combine several ``Examples`` with the same ``tokens``, in order; at least one."""
    assert all(part.tokens is parts[0].tokens for part in parts)
    columns = zip(*(part.columns for part in parts), strict=True)
    return Examples(parts[0].tokens, *map(np.concatenate, columns))


def count_targets(examples: Examples) -> IntArray:
    """Number of targets of each example, ``int64 (R,)``, counted in its tokens."""
    counts = [np.zeros(0, np.int64)]
    for block in examples.iterate_blocks():
        _, loss_mask = examples.read(block)
        if len(loss_mask):
            # `reduceat` gives an empty segment the value that follows it; examples have a token at least.
            counts.append(np.add.reduceat(loss_mask, _exclusive_sum(examples.lengths[block]), dtype=np.int64))
    return np.concatenate(counts)


def fit_to_length(examples: Examples, capacity: int, overlong: Overlong) -> tuple[Examples, LengthCounts]:
    """Limit every example to ``capacity`` tokens, and drop those without a target.

    ``truncate`` keeps the start; ``drop`` drops the row; ``split`` makes pieces of ``capacity`` tokens, each a separate
    document; ``error`` changes nothing, and the caller raises with the names of the rows.

    Args:
        examples: Examples; not modified.
        capacity: Tokens that fit, at least 2.
        overlong: What happens to longer examples.

    Returns:
        The examples that are left, in order, and what was lost.
    """
    too_long = examples.lengths > capacity
    fitted = examples
    if too_long.any() and overlong == "drop":
        fitted = examples.take(np.flatnonzero(~too_long))
    elif too_long.any() and overlong != "error":
        fitted = _cut(examples, capacity, splits=overlong == "split")
    with_target = fitted.num_targets > 0
    left = fitted if with_target.all() else fitted.take(np.flatnonzero(with_target))
    num_targets = int(examples.num_targets.sum())
    return left, LengthCounts(
        num_overlong=int(too_long.sum()),
        num_without_target=int((~with_target).sum()),
        num_lost_rows=len(examples) - len(np.unique(left.row_ids)),
        num_lost_tokens=int(examples.lengths.sum() - left.lengths.sum()),
        num_lost_targets=num_targets - int(left.num_targets.sum()),
        num_targets=num_targets,
    )


def pack_best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Bins:
    """Pack examples into bins of ``capacity`` tokens by best-fit decreasing over the whole set.

    In order of decreasing length, each example is placed in the bin with the least remaining space. Examples of equal
    length are placed together, as many as fit into the tightest bin, which gives the same packing: a million examples
    take well under a second.

    Args:
        lengths: ``int (R,)``, each from 1 to ``capacity``.
        capacity: Tokens a bin holds.

    Returns:
        Bins in the order of their first example; inside a bin the order of the input.

    Source: best-fit decreasing (Johnson 1974); the loads equal TRL's ``bfd`` over one batch,
    ``tests/data/packed/test_packing.py``.
    """
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bin_of = np.empty(len(lengths), np.int64)
    bins_with_space: dict[int, list[int]] = defaultdict(list)
    occupied = 0  # bit s is set if a bin has exactly s tokens of space
    num_bins = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            fitting = occupied >> length
            # The lowest set bit is the tightest bin that has room; without any, a new bin.
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            # As many of this length as the bin holds, then the next bin with the same space: as one after the other.
            each = min(space // length, end - placed)
            num_taken = (end - placed) // each
            if fitting:
                candidates = bins_with_space[space]
                taken = candidates[-num_taken:]
                del candidates[-num_taken:]
                # The last bin of that space is taken: clear its bit.
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
    """``pack_best_fit``, or without packing one bin per example, in order."""
    if packing:
        return pack_best_fit(lengths, capacity)
    return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _group(bin_of: IntArray, num_bins: int) -> Bins:
    """Bins from each example's bin number, renumbered in the order of their first example."""
    first = np.full(num_bins, len(bin_of), np.int64)
    # Unbuffered: an assignment would keep the last example of each bin, not the first.
    np.minimum.at(first, bin_of, np.arange(len(bin_of)))
    order = np.argsort(first[bin_of], kind="stable")
    counts = np.bincount(bin_of, minlength=num_bins)[np.argsort(first)]
    return Bins(order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _cut(examples: Examples, capacity: int, *, splits: bool) -> Examples:
    """Examples split into pieces of ``capacity`` tokens and a shorter last one, or only the first piece of each."""
    num_pieces = -(-examples.lengths // capacity) if splits else np.ones_like(examples.lengths)
    whole = np.repeat(np.arange(len(examples)), num_pieces)
    cut_off = capacity * (np.arange(len(whole)) - np.repeat(_exclusive_sum(num_pieces), num_pieces))
    pieces = examples.take(whole)
    is_cut = np.flatnonzero(pieces.lengths > capacity)
    lengths = np.minimum(pieces.lengths - cut_off, capacity)
    pieces = replace(pieces, starts=pieces.starts + cut_off, lengths=lengths)
    # Counted again: the first token of each further piece is no target any more. `take` has copied the counts.
    pieces.num_targets[is_cut] = count_targets(pieces.take(is_cut))
    return pieces


def _exclusive_sum(lengths: IntArray) -> IntArray:
    return np.cumsum(lengths) - lengths

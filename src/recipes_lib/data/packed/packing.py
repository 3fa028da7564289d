"""Truncation and sequence packing as pure array functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import Overlong
from recipes_lib.data.chat.remarks import Remarked, take_remarked
from recipes_lib.data.sources.rows import EncodedRow

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Examples:
    """Tokenised examples laid end to end, R examples of N tokens in all.

    Attributes:
        input_ids: ``uint32 (N,)``.
        loss_mask: ``bool (N,)``; True where the token is a target. False at the first token of every example, which
            nothing predicts: its sum is the number of target tokens.
        lengths: ``int64 (R,)``; tokens of each example, at least 1.
        row_ids: ``int64 (R,)``; position of each example's row in its source. Pieces of a split row share it.
        remarked: The rows of which an audit should tell something; those that were cut are not looked at again.
    """

    input_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    lengths: IntArray
    row_ids: IntArray
    remarked: Sequence[Remarked] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> IntArray:
        """Where each example begins, ``int64 (R,)``."""
        return _exclusive_sum(self.lengths)

    @property
    def num_targets(self) -> IntArray:
        """Target tokens of each example, ``int64 (R,)``."""
        return np.add.reduceat(self.loss_mask, self.starts, dtype=np.int64) if len(self) else self.lengths

    def take(self, indices: npt.NDArray[np.integer]) -> Examples:
        """The examples at ``indices``, ``(K,)``, in that order."""
        lengths = self.lengths[indices]
        tokens = np.repeat(self.starts[indices] - _exclusive_sum(lengths), lengths) + np.arange(lengths.sum())
        row_ids = self.row_ids[indices]
        remarked = take_remarked(self.remarked, row_ids)
        return Examples(self.input_ids[tokens], self.loss_mask[tokens], lengths, row_ids, remarked)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """What ``fit_to_length`` met and what it cost; ``lost`` counts what is no longer trained on.

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
        """Share of the target tokens that is gone, 0 to 1."""
        return self.num_lost_targets / max(1, self.num_targets)


@dataclass(frozen=True, slots=True)
class Bins:
    """Which examples share a row of the batch.

    Attributes:
        order: ``int64 (R,)``; indices of the examples, bin after bin.
        offsets: ``int64 (num_bins + 1,)``; bin ``k`` is ``order[offsets[k]:offsets[k + 1]]``.
    """

    order: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def build_examples(rows: Sequence[EncodedRow], row_ids: npt.ArrayLike) -> Examples:
    """Lays encoded rows end to end.

    Args:
        rows: Encoded rows of at least one token each; a target at position 0 is cleared.
        row_ids: ``int (len(rows),)``.
    """
    lengths = np.fromiter((len(row.input_ids) for row in rows), np.int64, len(rows))
    assert lengths.all(), "a row without tokens"
    ids = [row.input_ids for row in rows] or [np.zeros(0, np.uint32)]
    masks = [row.loss_mask for row in rows] or [np.zeros(0, np.bool_)]
    examples = Examples(np.concatenate(ids), np.concatenate(masks), lengths, np.asarray(row_ids, np.int64))
    examples.loss_mask[examples.starts] = False
    return examples


def concatenate_examples(parts: Sequence[Examples]) -> Examples:
    """One ``Examples`` of several, in order; at least one."""
    return Examples(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate([part.loss_mask for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.row_ids for part in parts]),
        [row for part in parts for row in part.remarked],
    )


def fit_to_length(examples: Examples, capacity: int, overlong: Overlong) -> tuple[Examples, LengthCounts]:
    """Makes every example at most ``capacity`` tokens long and drops those without a target.

    ``truncate`` keeps the start; ``drop`` leaves the row out; ``split`` cuts it into pieces of ``capacity`` tokens,
    each a document of its own; ``error`` cuts nothing and leaves the refusal, which names the rows, to the caller.

    Args:
        examples: Examples; not modified.
        capacity: Tokens that fit, at least 2.
        overlong: What happens to longer examples.

    Returns:
        The examples that are left, in order, and what was lost.
    """
    too_long = examples.lengths > capacity
    fitted = examples
    if overlong == "truncate" and too_long.any():
        position = np.arange(len(examples.input_ids)) - np.repeat(examples.starts, examples.lengths)
        keep = position < capacity
        lengths = np.minimum(examples.lengths, capacity)
        fitted = Examples(examples.input_ids[keep], examples.loss_mask[keep], lengths, examples.row_ids)
    elif overlong == "drop" and too_long.any():
        fitted = examples.take(np.flatnonzero(~too_long))
    elif overlong == "split" and too_long.any():
        fitted = _split(examples, capacity)
    with_target = fitted.num_targets > 0
    left = fitted if with_target.all() else fitted.take(np.flatnonzero(with_target))
    num_targets = int(examples.loss_mask.sum())
    return left, LengthCounts(
        num_overlong=int(too_long.sum()),
        num_without_target=int((~with_target).sum()),
        num_lost_rows=len(np.setdiff1d(examples.row_ids, left.row_ids)),
        num_lost_tokens=len(examples.input_ids) - len(left.input_ids),
        num_lost_targets=num_targets - int(left.loss_mask.sum()),
        num_targets=num_targets,
    )


def pack_best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Bins:
    """Packs examples into bins of ``capacity`` tokens by best-fit decreasing over the whole set.

    Longest first, each example goes to the bin in which it leaves the least space. Examples of one length are placed
    together, the tightest bin taking as many as fit, which is the same packing: a million take well under a second.

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
    occupied = 0  # bit s is set when a bin has exactly s tokens of space
    num_bins = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            fitting = occupied >> length
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = min(space // length, end - placed)
            num_taken = (end - placed) // each
            if fitting:
                candidates = bins_with_space[space]
                taken = candidates[-num_taken:]
                del candidates[-num_taken:]
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
    """``pack_best_fit``, or without packing one bin for each example, in order."""
    if packing:
        return pack_best_fit(lengths, capacity)
    return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _group(bin_of: IntArray, num_bins: int) -> Bins:
    """Bins from each example's bin number, renumbered in the order of their first example."""
    first = np.full(num_bins, len(bin_of), np.int64)
    np.minimum.at(first, bin_of, np.arange(len(bin_of)))
    order = np.argsort(first[bin_of], kind="stable")
    counts = np.bincount(bin_of, minlength=num_bins)[np.argsort(first)]
    return Bins(order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _split(examples: Examples, capacity: int) -> Examples:
    """Examples cut into pieces of ``capacity`` tokens and a shorter last one."""
    num_pieces = -(-examples.lengths // capacity)
    lengths = np.full(num_pieces.sum(), capacity, np.int64)
    lengths[np.cumsum(num_pieces) - 1] = examples.lengths - (num_pieces - 1) * capacity
    loss_mask = examples.loss_mask.copy()
    loss_mask[_exclusive_sum(lengths)] = False
    return Examples(examples.input_ids, loss_mask, lengths, np.repeat(examples.row_ids, num_pieces))


def _exclusive_sum(lengths: IntArray) -> IntArray:
    return np.cumsum(lengths) - lengths

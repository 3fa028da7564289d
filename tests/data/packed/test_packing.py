"""Best-fit-decreasing packing, against a direct implementation and TRL, and the handling of overlong rows."""

from __future__ import annotations

import bisect
import itertools

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import pack_dataset

from recipes_lib.data.packed import packing
from recipes_lib.data.packed.packing import (
    Examples,
    LengthCounts,
    build_examples,
    choose_bins,
    concatenate_examples,
    count_targets,
    fit_to_length,
    pack_best_fit,
    split_blocks,
)
from recipes_lib.data.sources.rows import EncodedRow

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)
rows_and_capacity = st.tuples(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=12), st.integers(2, 12)
)


def reference_loads(lengths: list[int], capacity: int) -> list[int]:
    """Return the loads of best-fit decreasing, one example at a time over a sorted list of spaces."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(spaces, length)
        space = spaces.pop(at) if at < len(spaces) else capacity
        bisect.insort(spaces, space - length)
    return sorted(capacity - space for space in spaces)


def examples_of(masks: list[list[bool]]) -> Examples:
    """Return examples of consecutive token ids with these masks."""
    ids = iter(range(1, 10_000))
    rows = [EncodedRow(np.array([next(ids) for _ in mask], np.uint32), np.array(mask, np.bool_)) for mask in masks]
    return build_examples(rows, range(len(rows)))


def list_parts(examples):
    return *examples.read(), examples.lengths, examples.row_ids


@settings(max_examples=40)
@given(lengths_and_capacity)
def test_bins_equal_best_fit_decreasing_in_input_order(case):
    lengths, capacity = np.array(case[0], np.int64), case[1]
    bins = pack_best_fit(lengths, capacity)
    assert sorted(bins.order) == list(range(len(lengths)))
    assert (bins.offsets[0], bins.offsets[-1]) == (0, len(lengths))
    members = [bins.order[start:stop] for start, stop in itertools.pairwise(bins.offsets)]
    assert sorted(lengths[bin_].sum() for bin_ in members) == reference_loads(case[0], capacity)
    assert np.all(np.diff(bins.order[bins.offsets[:-1]]) > 0)
    assert all(np.all(np.diff(bin_) > 0) for bin_ in members)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_packing_accepts_any_integer_dtype(dtype):
    lengths = np.array([5, 3, 8, 1, 7, 2], dtype)
    assert np.array_equal(pack_best_fit(lengths, 8).order, pack_best_fit(lengths.astype(np.int64), 8).order)


@settings(max_examples=2)
@given(st.integers(0, 2**32 - 1))
def test_num_bins_agrees_with_trl(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(4, 1, 3000)), 1, 512).astype(np.int64)
    table = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    ours = len(pack_best_fit(lengths, 512))
    assert ours == len(pack_dataset(table, 512, "bfd", {"batch_size": len(table), "keep_in_memory": True}))
    assert ours <= len(pack_dataset(table, 512, "bfd", {"keep_in_memory": True}))


def test_unpacked_examples_have_one_bin_each():
    bins = choose_bins(np.array([1, 2, 1]), 8, packing=False)
    assert bins.order.tolist() == [0, 1, 2]
    assert bins.offsets.tolist() == [0, 1, 2, 3]


def test_first_token_is_never_a_target_and_id_0_can_be():
    rows = [
        EncodedRow(np.array([7, 0], np.uint32), np.array([True, True])),
        EncodedRow(np.array([9], np.uint32), np.array([True])),
    ]
    examples = build_examples(rows, [10, 12])
    assert examples.read()[0].tolist() == [7, 0, 9]
    assert examples.read()[1].tolist() == [False, True, False]
    assert examples.row_ids.tolist() == [10, 12]
    assert examples.num_targets.tolist() == [1, 0]
    assert rows[0].loss_mask.all(), "the caller's row was changed"


@settings(max_examples=40)
@given(rows_and_capacity)
def test_take_equals_concatenation(case):
    examples = examples_of(case[0])
    picked = np.arange(len(examples))[::-1]
    one_by_one = concatenate_examples([examples.take(np.array([index])) for index in picked])
    taken = examples.take(picked)
    assert all(map(np.array_equal, list_parts(taken), list_parts(one_by_one)))


@settings(max_examples=40)
@given(rows_and_capacity, st.integers(1, 30))
def test_blocks_cover_examples_in_order_and_are_bounded(case, tokens_at_once):
    examples = examples_of(case[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "_TOKENS_AT_ONCE", tokens_at_once)
        blocks = [np.arange(len(examples))[block] for block in split_blocks(examples.lengths)]
        assert count_targets(examples).tolist() == [sum(mask[1:]) for mask in case[0]]
    assert np.concatenate(blocks).tolist() == list(range(len(examples)))
    assert all(examples.lengths[block].sum() < tokens_at_once + examples.lengths.max() for block in blocks)


def cut(mask: list[bool], capacity: int, overlong: str) -> list[list[bool]]:
    """Return the masks of the pieces of one row; the first token of a piece is no target."""
    if overlong == "split":
        pieces = [mask[at : at + capacity] for at in range(0, len(mask), capacity)]
    elif overlong == "drop":
        pieces = [mask] * (len(mask) <= capacity)
    else:
        pieces = [mask[:capacity] if overlong == "truncate" else mask]
    return [[False, *piece[1:]] for piece in pieces]


@settings(max_examples=40)
@given(rows_and_capacity, st.sampled_from(["error", "truncate", "drop", "split"]))
def test_overlong_handling_equals_direct_count(case, overlong):
    masks, capacity = case
    examples = examples_of(masks)
    fitted, counts = fit_to_length(examples, capacity, overlong)
    pieces = [(row, piece) for row, mask in enumerate(masks) for piece in cut(mask, capacity, overlong)]
    kept = [(row, piece) for row, piece in pieces if any(piece)]
    assert fitted.row_ids.tolist() == [row for row, _ in kept]
    assert fitted.lengths.tolist() == [len(piece) for _, piece in kept]
    assert fitted.read()[1].tolist() == [flag for _, piece in kept for flag in piece]
    starts, firsts = np.cumsum([0, *map(len, masks)]), dict.fromkeys(range(len(masks)), 0)
    ids = []
    for row, piece in pieces:
        at = int(starts[row]) + 1 + firsts[row]
        ids += range(at, at + len(piece)) if any(piece) else ()
        firsts[row] += len(piece)
    assert fitted.read()[0].tolist() == ids
    targets = sum(sum(mask[1:]) for mask in masks)
    assert counts == LengthCounts(
        num_overlong=sum(len(mask) > capacity for mask in masks),
        num_without_target=len(pieces) - len(kept),
        num_lost_rows=len(masks) - len({row for row, _ in kept}),
        num_lost_tokens=sum(map(len, masks)) - len(ids),
        num_lost_targets=targets - sum(sum(piece) for _, piece in kept),
        num_targets=targets,
    )
    assert all(map(np.array_equal, list_parts(examples), list_parts(examples_of(masks)))), "the input is changed"


def test_lost_fraction_counts_target_tokens():
    _, counts = fit_to_length(examples_of([[False] + [True] * 9, [False, True]]), 6, "truncate")
    assert counts.lost_fraction == pytest.approx(4 / 10)

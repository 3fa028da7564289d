"""Packing keeps every example once, overfills nothing, and counts what a cut costs."""

from __future__ import annotations

import bisect

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import pack_dataset

from recipes_lib.data.packed import packing
from recipes_lib.data.packed.packing import (
    Examples,
    build_examples,
    choose_bins,
    concatenate_examples,
    count_targets,
    fit_to_length,
    pack_best_fit,
)
from recipes_lib.data.sources.rows import EncodedRow

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)
rows_and_capacity = st.tuples(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=12), st.integers(2, 12)
)


def reference_loads(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing, one example at a time over a sorted list of spaces."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(spaces, length)
        space = spaces.pop(at) if at < len(spaces) else capacity
        bisect.insort(spaces, space - length)
    return sorted(capacity - space for space in spaces)


def examples_of(masks: list[list[bool]]) -> Examples:
    """Rows of consecutive token ids with these masks."""
    ids = iter(range(1, 10_000))
    rows = [EncodedRow(np.array([next(ids) for _ in mask], np.uint32), np.array(mask, np.bool_)) for mask in masks]
    return build_examples(rows, range(len(rows)))


@given(lengths_and_capacity)
def test_every_example_is_packed_once_and_no_bin_is_overfull(case):
    lengths, capacity = np.array(case[0], np.int64), case[1]
    bins = pack_best_fit(lengths, capacity)
    assert sorted(bins.order) == list(range(len(lengths)))
    members = [bins.order[start:stop] for start, stop in zip(bins.offsets, bins.offsets[1:], strict=False)]
    assert all(0 < lengths[bin_].sum() <= capacity for bin_ in members)
    assert bins.offsets[0] == 0
    assert bins.offsets[-1] == len(lengths)


@given(lengths_and_capacity)
def test_loads_equal_one_at_a_time_best_fit_decreasing(case):
    lengths, capacity = np.array(case[0], np.int64), case[1]
    bins = pack_best_fit(lengths, capacity)
    loads = [lengths[bins.order[a:b]].sum() for a, b in zip(bins.offsets, bins.offsets[1:], strict=False)]
    assert sorted(loads) == reference_loads(case[0], capacity)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_the_integer_type_of_the_lengths_does_not_matter(dtype):
    lengths = np.array([5, 3, 8, 1, 7, 2], dtype)
    assert np.array_equal(pack_best_fit(lengths, 8).order, pack_best_fit(lengths.astype(np.int64), 8).order)


@given(lengths_and_capacity)
def test_bins_and_their_members_stand_in_the_order_of_the_input(case):
    bins = pack_best_fit(np.array(case[0], np.int64), case[1])
    firsts = bins.order[bins.offsets[:-1]]
    assert np.all(np.diff(firsts) > 0)
    for start, stop in zip(bins.offsets, bins.offsets[1:], strict=False):
        assert np.all(np.diff(bins.order[start:stop]) > 0)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_as_many_bins_as_trl_over_one_batch_and_no_more_than_trl_by_default(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(4, 1, 3000)), 1, 512).astype(np.int64)
    table = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    ours = len(pack_best_fit(lengths, 512))
    assert ours == len(pack_dataset(table, 512, "bfd", {"batch_size": len(table), "keep_in_memory": True}))
    assert ours <= len(pack_dataset(table, 512, "bfd", {"keep_in_memory": True}))


def test_nothing_to_pack_gives_no_bins():
    assert len(pack_best_fit(np.zeros(0, np.int64), 8)) == 0
    assert len(choose_bins(np.zeros(0, np.int64), 8, packing=False)) == 0


def test_without_packing_each_example_has_its_own_bin():
    bins = choose_bins(np.array([1, 2, 1]), 8, packing=False)
    assert bins.order.tolist() == [0, 1, 2]
    assert bins.offsets.tolist() == [0, 1, 2, 3]


def test_the_first_token_is_never_a_target():
    rows = [
        EncodedRow(np.array([7, 8], np.uint32), np.array([True, True])),
        EncodedRow(np.array([9], np.uint32), np.array([True])),
    ]
    examples = build_examples(rows, [10, 12])
    assert examples.input_ids.tolist() == [7, 8, 9]
    assert examples.loss_mask.tolist() == [False, True, False]
    assert examples.row_ids.tolist() == [10, 12]
    assert examples.num_targets.tolist() == [1, 0]
    assert rows[0].loss_mask.all(), "the caller's row was changed"


def test_no_rows_give_no_examples():
    examples = build_examples([], [])
    assert len(examples) == 0
    assert examples.num_targets.tolist() == []


@given(rows_and_capacity)
def test_taking_examples_equals_concatenating_them(case):
    examples = examples_of(case[0])
    picked = np.arange(len(examples))[::-1]
    one_by_one = concatenate_examples([examples.take(np.array([index])) for index in picked])
    taken = examples.take(picked)
    for name in ("input_ids", "loss_mask", "lengths", "row_ids"):
        assert np.array_equal(getattr(taken, name), getattr(one_by_one, name))


@given(rows_and_capacity, st.integers(1, 30))
def test_blocks_cover_the_examples_in_order_and_are_bounded(case, tokens_at_once):
    examples = examples_of(case[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "_TOKENS_AT_ONCE", tokens_at_once)
        blocks = [np.arange(len(examples))[block] for block in examples.iterate_blocks()]
        assert count_targets(examples).tolist() == [sum(mask[1:]) for mask in case[0]]
    assert np.concatenate(blocks).tolist() == list(range(len(examples)))
    assert all(examples.lengths[block].sum() < tokens_at_once + examples.lengths.max() for block in blocks)


@given(rows_and_capacity)
def test_truncation_keeps_the_start_of_rows_that_still_have_a_target(case):
    masks, capacity = case
    fitted, counts = fit_to_length(examples_of(masks), capacity, "truncate")
    kept = [row for row, mask in enumerate(masks) if any(mask[1:capacity])]
    assert fitted.row_ids.tolist() == kept
    starts = np.cumsum([0, *map(len, masks)])
    expected = [starts[row] + 1 + at for row in kept for at in range(min(capacity, len(masks[row])))]
    assert fitted.input_ids.tolist() == expected
    assert counts.num_overlong == sum(len(mask) > capacity for mask in masks)
    assert counts.num_lost_rows == counts.num_without_target == len(masks) - len(kept)
    assert counts.num_lost_tokens == sum(map(len, masks)) - len(expected)
    assert counts.num_lost_targets == sum(sum(mask[capacity:]) for mask in masks)
    assert counts.num_targets == sum(sum(mask[1:]) for mask in masks)


@given(rows_and_capacity)
def test_drop_leaves_out_exactly_the_long_rows_and_those_without_a_target(case):
    masks, capacity = case
    fitted, counts = fit_to_length(examples_of(masks), capacity, "drop")
    short = [row for row, mask in enumerate(masks) if len(mask) <= capacity]
    assert fitted.row_ids.tolist() == [row for row in short if any(masks[row][1:])]
    assert counts.num_lost_targets == sum(sum(mask[1:]) for mask in masks if len(mask) > capacity)
    assert counts.num_without_target == sum(not any(masks[row][1:]) for row in short)


@given(rows_and_capacity)
def test_split_cuts_at_the_capacity_and_loses_only_the_first_target_of_each_piece(case):
    masks, capacity = case
    fitted, counts = fit_to_length(examples_of(masks), capacity, "split")
    ids = iter(range(1, 10_000))
    pieces = [
        (row, [next(ids) for _ in mask[at : at + capacity]], mask[at + 1 : at + capacity])
        for row, mask in enumerate(masks)
        for at in range(0, len(mask), capacity)
    ]
    kept = [piece for piece in pieces if any(piece[2])]
    assert fitted.row_ids.tolist() == [row for row, _, _ in kept]
    assert fitted.input_ids.tolist() == [token for _, tokens, _ in kept for token in tokens]
    assert fitted.loss_mask.tolist() == [flag for _, _, targets in kept for flag in (False, *targets)]
    assert counts.num_without_target == len(pieces) - len(kept)
    assert counts.num_lost_rows == len(masks) - len({row for row, _, _ in kept})


@given(rows_and_capacity, st.sampled_from(["error", "truncate", "drop", "split"]))
def test_fitting_never_changes_its_input(case, overlong):
    examples, before = examples_of(case[0]), examples_of(case[0])
    fit_to_length(examples, case[1], overlong)
    for name in ("input_ids", "loss_mask", "lengths", "row_ids"):
        assert np.array_equal(getattr(examples, name), getattr(before, name))


@given(rows_and_capacity)
def test_error_counts_the_long_rows_and_cuts_nothing(case):
    masks, capacity = case
    fitted, counts = fit_to_length(examples_of(masks), capacity, "error")
    assert counts.num_overlong == sum(len(mask) > capacity for mask in masks)
    assert counts.num_lost_targets == 0
    assert fitted.lengths.tolist() == [len(mask) for mask in masks if any(mask[1:])]


def test_the_lost_share_is_of_target_tokens():
    _, counts = fit_to_length(examples_of([[False] + [True] * 9, [False, True]]), 6, "truncate")
    assert counts.lost_fraction == pytest.approx(4 / 10)

"""The dataset of token rows: windows, micro-batches, world sizes, workers, and evaluation."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from recipes_lib.data.packed.collators import IGNORE_INDEX, PackedCollator
from recipes_lib.data.tokens.dataset import NO_SOURCE, EvalWindows, RowOrder, RowSkips, TokenDataset
from recipes_lib.data.tokens.shards import TokenSource, TokenWriter

LENGTH = 8


@pytest.fixture
def sources(tmp_path):
    """Three sources whose token ids encode their place: 1000 times the source plus the position."""
    rng = np.random.default_rng(0)
    found = []
    for number, num_tokens in enumerate([203, 95, 160]):
        lengths = []
        while sum(lengths) < num_tokens:
            lengths.append(min(int(rng.integers(1, 15)), num_tokens - sum(lengths)))
        ids = np.arange(num_tokens, dtype=np.uint32) + 1000 * number
        with TokenWriter(tmp_path / str(number), num_ids=10_000) as writer:
            writer.append(ids, np.array(lengths), np.zeros(len(lengths), np.uint64))
            found.append(TokenSource(str(number), tmp_path / str(number), **writer.describe()))
    return found


def build(sources, row_starts, *, micro=2, full=None, weights=(0.5, 0.2, 0.3), isolated=True, seed=0) -> TokenDataset:
    starts = np.array(row_starts, np.int64)
    return TokenDataset(
        sources,
        RowOrder([source.num_tokens // LENGTH for source in sources], [(0, weights)], seed=seed),
        max_length=LENGTH,
        row_starts=starts,
        rows_per_step=full or int(np.diff(starts).max()),
        rows_per_micro_step=micro,
        isolated=isolated,
    )


def window_of(row) -> tuple[int, int]:
    """Source and window of a row, after a check of all of its tokens."""
    first = int(row["input_ids"][0])
    assert row["input_ids"].tolist() == list(range(first, first + LENGTH))
    assert row["source"] == first // 1000
    assert first % 1000 % LENGTH == 0
    return row["source"], first % 1000 // LENGTH


def test_every_window_occurs_once_per_pass(sources):
    dataset = build(sources, np.arange(0, 101, 4), weights=(1, 0, 0))
    windows = [window_of(dataset[index])[1] for index in range(100)]
    assert [sorted(windows[start : start + 25]) for start in (0, 25, 50, 75)] == [list(range(25))] * 4
    assert windows[:25] != windows[25:50]


def test_items_are_equal_single_and_batched(sources):
    dataset = build(sources, [0, 2, 6, 12, 18])
    for indices in (range(24), [5, 3, 17, 17, 23], [7]):
        for together, index in zip(dataset.__getitems__(list(indices)), indices, strict=True):
            alone = dataset[index]
            assert alone.keys() == together.keys()
            assert all(np.array_equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("isolated", [True, False])
def test_row_is_full_and_marks_document_ends(sources, isolated):
    dataset = build(sources, [0, 60], isolated=isolated)
    for index in range(60):
        row = dataset[index]
        source, window = window_of(row)
        expected = sources[source].read_document_lengths(window * LENGTH, (window + 1) * LENGTH)
        assert row["seq_lengths"].tolist() == (expected.tolist() if isolated else [LENGTH])
        assert row["loss_mask"].tolist() == [True] * LENGTH


def test_small_step_starts_with_empty_micro_batches(sources):
    dataset = build(sources, [0, 2, 6, 12, 18], micro=2, full=8)
    assert len(dataset) == 4 * 8
    sizes = [[len(dataset[8 * step + item]["input_ids"]) for item in range(8)] for step in range(4)]
    assert sizes == [[0] * (8 - rows) + [LENGTH] * rows for rows in (2, 4, 6, 6)]
    constant = build(sources, [0, 18])
    real = [dataset[index] for index in range(32) if dataset[index]["source"] != NO_SOURCE]
    assert [window_of(row) for row in real] == [window_of(constant[index]) for index in range(18)]


@pytest.mark.parametrize(
    ("row_starts", "micro", "full"), [([0, 3], 2, 4), ([0, 6], 2, 4), ([0, 4], 4, 6), ([0, 4, 4], 2, 4)]
)
def test_steps_that_would_deadlock_are_refused(sources, row_starts, micro, full):
    with pytest.raises(AssertionError):
        build(sources, row_starts, micro=micro, full=full)


def read_as(dataset, per_device: int, num_processes: int) -> list[list[tuple[int, int]]]:
    """Return the windows of each step if batches are distributed over ranks round-robin, as by accelerate."""
    batches = [range(start, start + per_device) for start in range(0, len(dataset), per_device)]
    micro_steps = [batches[at : at + num_processes] for at in range(0, len(batches), num_processes)]
    per_step = dataset.rows_per_step // (per_device * num_processes)
    steps = []
    for at in range(0, len(micro_steps), per_step):
        indices = [index for micro in micro_steps[at : at + per_step] for batch in micro for index in batch]
        steps.append(sorted(window_of(row) for row in dataset.__getitems__(indices) if row["source"] != NO_SOURCE))
    return steps


def test_step_rows_are_independent_of_world_size(sources):
    row_starts = [0, 4, 8, 16, 24, 32]
    seen = {
        (per_device, processes): read_as(
            build(sources, row_starts, micro=per_device * processes), per_device, processes
        )
        for per_device, processes in [(1, 1), (4, 1), (2, 2), (1, 4), (1, 2)]
    }
    assert all(steps == seen[1, 1] for steps in seen.values())
    assert list(map(len, seen[1, 1])) == [4, 4, 8, 8, 8]


@pytest.mark.multiprocess
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_are_equal_with_workers(sources, context):
    # Pickled, as for a worker that is spawned.
    dataset = pickle.loads(pickle.dumps(build(sources, [0, 2, 6, 12], full=6)))
    collate = PackedCollator(pad_token_id=0)
    here = list(DataLoader(dataset, batch_size=2, sampler=SequentialSampler(dataset), collate_fn=collate))
    there = list(DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=2, multiprocessing_context=context))
    assert len(here) == len(there) == 9
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])) for name in ours)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_collator_accepts_rows_and_placeholders(sources, layout):
    dataset = build(sources, [0, 2, 4], full=4)
    collate = PackedCollator(pad_token_id=0, layout=layout)
    empty, full = collate(dataset.__getitems__([0, 1])), collate(dataset.__getitems__([2, 3]))
    assert (int(empty["num_tokens"]), empty["input_ids"].numel()) == (0, 0)
    assert (int(full["num_tokens"]), full["input_ids"].numel()) == (2 * LENGTH, 2 * LENGTH)
    num_pieces = sum(len(dataset[index]["seq_lengths"]) for index in (2, 3))
    assert int((full["labels"] != IGNORE_INDEX).sum()) == 2 * LENGTH - num_pieces


@pytest.mark.parametrize("isolated", [True, False])
def test_evaluation_reads_every_token_once(sources, isolated):
    for source in sources:
        rows = list(EvalWindows(source, max_length=LENGTH, isolated=isolated))
        assert len(rows) == -(-source.num_tokens // LENGTH)
        ids = np.concatenate([row["input_ids"] for row in rows])
        assert ids.tolist() == source.read(0, source.num_tokens).tolist()
        assert [len(row["input_ids"]) for row in rows[:-1]] == [LENGTH] * (len(rows) - 1)
        assert all(len(row["input_ids"]) == len(row["loss_mask"]) == row["seq_lengths"].sum() for row in rows)
        ends = set(np.cumsum(source.read_document_lengths(0, len(ids))).tolist())
        borders = {at * LENGTH + int(end) for at, row in enumerate(rows) for end in np.cumsum(row["seq_lengths"])}
        assert borders == (ends if isolated else set()) | {*range(LENGTH, len(ids), LENGTH), len(ids)}


def test_skipped_rows_shift_later_rows_and_keep_numbers(sources):
    dataset, shorter = (build(sources, np.arange(0, 41, 4)) for _ in range(2))
    shorter.skips = RowSkips(((6, 11), (20, 21)))
    left = [row for row in range(40) if not (6 <= row < 11 or row == 20)]
    for item, number in enumerate(left):
        row = shorter[item]
        assert row["row_ids"].tolist() == [number]
        np.testing.assert_array_equal(row["input_ids"], dataset[number]["input_ids"])
    assert dataset.find_rows(3) == (12, 16)

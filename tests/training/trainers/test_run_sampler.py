"""Row order of a run: transformers' order, skipped rows, and shards of data-parallel ranks."""

import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from tests.training.trajectories import make_packs, make_trainer
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Trainer

from recipes_lib.data.sources.replay_dataset import EpochOrder
from recipes_lib.data.tokens.dataset import RowSkips
from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer, RunSampler, shard_evenly


def record_rows(trainer):
    """Train and return the row ids of each step, from the guard's inputs."""
    steps, check_step = [], trainer.guard.check_step

    def record(norm):
        steps.append([sorted(set(ids.tolist())) for ids in trainer.guard.inputs.row_ids])
        return check_step(norm)

    trainer.guard.check_step = record
    trainer.train()
    return steps


@pytest.mark.parametrize(("strategy", "drop_last"), [("random", True), ("sequential", False)])
def test_row_order_equals_transformers_without_skips(tiny_model_dir, tmp_path, monkeypatch, strategy, drop_last):
    keys = {"max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5}
    keys |= {"train_sampling_strategy": strategy, "dataloader_drop_last": drop_last}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path / "ours", make_packs(11), **keys)
    rows = record_rows(trainer)
    found = [trainer.find_rows(step) for step in range(7)]
    other, _ = make_trainer(tiny_model_dir, tmp_path / "upstream", make_packs(11), **keys)
    monkeypatch.setattr(other, "_get_train_sampler", lambda rows=None: Trainer._get_train_sampler(other, rows))
    assert rows == record_rows(other)
    # ``find_rows`` predicts the rows of each step.
    order = [row for epoch in range(3) for row in permute(11, 5 + epoch, strategy)]
    for step, (first, stop) in enumerate(found):
        taken = {row for batch in rows[step] for row in batch}
        assert taken <= set(order[first:stop])
        assert drop_last or taken == set(order[first:stop])


def permute(num_rows, seed, strategy):
    if strategy == "sequential":
        return list(range(num_rows))
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("seed", [None, 3])
def test_skipped_rows_shift_later_rows_across_epochs(seed):
    skips = RowSkips(((4, 7), (9, 13), (30, 31)))
    kept = [(n // 10, n % 10) for n in range(60) if not any(first <= n < stop for first, stop in skips.ranges)]
    orders = [permute(10, seed + epoch if seed else 0, "random" if seed else "sequential") for epoch in range(6)]
    expected = [orders[epoch][at] for epoch, at in kept]
    epoch = 0
    sampler = RunSampler(EpochOrder(10, seed), skips=skips, read_epoch=lambda: epoch)
    for epoch in range(4):
        assert list(sampler) == expected[10 * epoch : 10 * epoch + 10]


def test_epoch_is_in_memory_as_arrays_only():
    sampler = RunSampler(EpochOrder(10**6, None), skips=RowSkips(), read_epoch=lambda: 0)
    tracemalloc.start()
    rows = iter(sampler)
    assert next(rows) == 0
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 20 * 10**6, "two of int64; a list would take 40 bytes a row"


def test_last_step_of_epoch_takes_remaining_rows():
    plan = SimpleNamespace(steps_per_epoch=3, rows_per_step=4)
    trainer = SimpleNamespace(_find_order=lambda: SimpleNamespace(rows_per_epoch=11), _plan_steps=lambda: plan)
    rows = [RecipeTrainer.find_rows(trainer, step) for step in range(30)]
    assert rows[:5] == [(0, 4), (4, 8), (8, 11), (11, 15), (15, 19)]
    assert rows[-1][0] == 11 * 9 + 8


@given(
    num_rows=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
    is_shuffled=st.booleans(),
)
def test_shard_evenly_gives_equal_batches_and_counts_rows_once(num_rows, batch_size, num_ranks, drop_last, is_shuffled):
    shuffled = RunSampler(EpochOrder(num_rows, 3), skips=RowSkips(), read_epoch=lambda: 1)
    sampler = shuffled if is_shuffled else SequentialSampler(range(num_rows))
    order, counted, lengths = list(sampler), [], set()
    for rank in range(num_ranks):
        # ``shard_evenly`` overrides accelerate's number of processes.
        batches = BatchSampler(sampler, batch_size, drop_last)
        shard = BatchSamplerShard(batches, num_processes=num_ranks + 1, process_index=0)
        is_last_repeated = shard_evenly(shard, num_ranks, rank)
        for _ in range(2):
            taken = list(shard)
            assert len(taken) == len(shard)
            assert all(taken)
        assert len(list(shard.batch_sampler)) == len(taken), "a resume skips no batch of another rank"
        lengths.add(len(taken))
        # Round-robin, as by accelerate.
        own = taken[: -1 if is_last_repeated else None]
        assert [batch[0] for batch in own] == order[rank * batch_size :: num_ranks * batch_size][: len(own)]
        counted += [row for batch in own for row in batch]
    rows_per_round = batch_size * num_ranks
    assert lengths == {num_rows // rows_per_round if drop_last else -(-num_rows // rows_per_round)}
    expected = order[: num_rows // rows_per_round * rows_per_round if drop_last else num_rows]
    assert sorted(counted) == sorted(expected)

"""Optimizer steps and warm-up, compared with transformers' Trainer."""

import itertools

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.planning.schedule import compute_steps, compute_warmup_steps


class _CountingTrainer(Trainer):
    """A Trainer without model and data, for its step counts."""

    def __init__(self, args, train_batch_size):
        self.args = args
        self._train_batch_size = train_batch_size
        self.is_in_train = False

    def get_sp_size(self):
        return 1

    def get_total_train_batch_size(self, args):
        return args.per_device_train_batch_size * args.gradient_accumulation_steps


@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_match_trainer(tmp_path, drop_last):
    for num_rows, batch, accumulation, epochs, max_steps in itertools.product(
        (1, 7, 8, 33), (1, 3, 8), (1, 4), (1, 2.5), (-1, 5)
    ):
        if drop_last and num_rows < batch:
            continue
        training = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "num_train_epochs": epochs,
            "max_steps": max_steps,
            "dataloader_drop_last": drop_last,
        }
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **training)
        loader = DataLoader(list(range(num_rows)), batch_size=batch, drop_last=drop_last)
        _, steps_per_epoch, _, _, _, _, num_steps = _CountingTrainer(args, batch).set_initial_training_values(
            args, loader
        )
        plan = compute_steps(num_rows, training, world_size=1)
        assert (plan.num_steps, plan.steps_per_epoch) == (num_steps, steps_per_epoch), training


def test_dropping_all_rows_is_refused():
    training = {"per_device_train_batch_size": 4, "dataloader_drop_last": True}
    assert compute_steps(8, training, world_size=2).steps_per_epoch == 1
    with pytest.raises(ConfigError, match=r"dataloader_drop_last: drops all 7 rows: .* the 8 of a batch"):
        compute_steps(7, training, world_size=2)


@pytest.mark.parametrize("warmup_steps", [0, 0.03, 0.1, 0.999, 1, 1.7, 10])
@pytest.mark.parametrize("num_steps", [1, 7, 100, 1001])
def test_warmup_matches_trainer(tmp_path, warmup_steps, num_steps):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, warmup_steps=warmup_steps)
    if 1 <= num_steps <= warmup_steps:
        with pytest.raises(ConfigError, match=r"warmup_steps: the warm-up .* is as long as the run"):
            compute_warmup_steps(warmup_steps, num_steps)
    else:
        # A share leaves one step, unlike upstream's.
        assert compute_warmup_steps(warmup_steps, num_steps) == min(args.get_warmup_steps(num_steps), num_steps - 1)


def test_steps_are_inversely_proportional_to_world_size():
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
    one, four = (compute_steps(64, training, world_size=size) for size in (1, 4))
    assert (one.num_steps, one.rows_per_step) == (8, 8)
    assert (four.num_steps, four.rows_per_step) == (2, 32)


def test_max_steps_without_number_of_rows():
    plan = compute_steps(None, {"max_steps": 12, "warmup_steps": 0.25}, world_size=2)
    assert (plan.num_steps, plan.steps_per_epoch, plan.num_warmup_steps, plan.rows_per_step) == (12, 0, 3, 16)

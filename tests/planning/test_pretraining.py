"""Plan of a pretraining run: length in steps, tokens or epochs; phases; errors."""

from __future__ import annotations

import pytest
from tests.planning.runs import build_config

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.planning.pretraining import count_run_tokens, plan_pretraining


def build(**keys):
    defaults = {"max_length": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return build_config("pretrain", **defaults | keys)


@pytest.mark.parametrize("world_size", [1, 4])
def test_length_in_steps_tokens_and_epochs_gives_same_plan(world_size) -> None:
    batch = 2 * 4 * world_size * 128
    by_steps = plan_pretraining(build(max_steps=10), world_size)
    by_tokens = plan_pretraining(build(max_tokens=10 * batch), world_size)
    by_epochs = plan_pretraining(build(num_train_epochs=2.5), world_size, num_windows=10 * batch // 128 // 5 * 2)
    for plan in (by_steps, by_tokens, by_epochs):
        assert (plan.num_steps, plan.num_tokens, plan.num_rows) == (10, 10 * batch, 10 * batch // 128)
        assert (plan.rows_per_micro_step, plan.rows_per_step) == (2 * world_size, 8 * world_size)
        assert (plan.row_starts == by_steps.row_starts).all()
    for length in ({"max_steps": 10}, {"max_tokens": 10 * batch}):
        assert count_run_tokens(build(**length), world_size) == 10 * batch
    assert plan_pretraining(build(max_tokens=10 * batch + 1), world_size).num_steps == 11
    assert count_run_tokens(build(num_train_epochs=3), world_size) is None


def test_phases_start_at_whole_rows() -> None:
    mixture = "--dataset_mixture=[{name: a/b}, {name: c/d}]"
    curriculum = "--dataset_curriculum=[{start_tokens: 0, weights: [1, 0]}, {start_tokens: 129, weights: [1, 3]}]"
    keys = ["--model_name_or_path=a/b", "--output_dir=o", "--max_length=128", "--max_steps=9", mixture, curriculum]
    plan = plan_pretraining(load_config("pretrain", keys), 1)
    assert plan.phases == [(0, [1, 0]), (2, [1, 3])]


def test_schedule_longer_than_run_raises() -> None:
    with pytest.raises(ConfigError, match="longer than the run"):
        plan_pretraining(build(max_tokens=1024, warmup_tokens=1000, lr_scheduler_type="warmup_stable_decay"), 1)

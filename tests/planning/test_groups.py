"""Generations and steps of RLOO and GRPO, compared with TRL's ``RepeatSampler``."""

from __future__ import annotations

import math
from functools import partial

import pytest
from tests.planning.runs import build_config
from trl.trainer.utils import RepeatSampler

from recipes_lib.errors import ConfigError
from recipes_lib.planning.schedule import plan_groups

load = partial(build_config, reward_funcs="[a.b:c]")


@pytest.mark.parametrize(
    ("num_prompts", "world_size", "keys"),
    [
        (100, 1, {"num_generations": 4}),
        (101, 2, {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}),
        (50, 1, {"num_generations": 2, "steps_per_generation": 4, "num_iterations": 3, "num_train_epochs": 2}),
    ],
)
def test_steps_match_trl_sampler(num_prompts, world_size, keys):
    plan = plan_groups(num_prompts, load("grpo", **keys), world_size)
    accumulation = keys.get("gradient_accumulation_steps", 1)
    steps = keys.get("steps_per_generation", accumulation)
    batch_size = keys.get("per_device_train_batch_size", 8)
    answers = batch_size * steps * world_size
    assert plan.answers_per_generation == answers
    assert plan.prompts_per_generation == answers // keys["num_generations"]
    sampler = RepeatSampler(
        range(num_prompts),
        mini_repeat_count=keys["num_generations"],
        batch_size=answers // keys["num_generations"],
        repeat_count=keys.get("num_iterations", 1) * steps,
    )
    num_batches = len(list(sampler)) // answers
    assert plan.steps.steps_per_epoch == math.ceil(num_batches / accumulation)
    assert plan.steps.num_steps == plan.steps.steps_per_epoch * keys.get("num_train_epochs", 1)


def test_default_group_sizes_match_trl():
    assert plan_groups(100, load("rloo"), 1).prompts_per_generation == 4
    assert plan_groups(100, load("grpo"), 1).prompts_per_generation == 1


def test_indivisible_answers_and_too_few_prompts_raise():
    with pytest.raises(ConfigError, match="8 answers at a time are not divisible into groups of num_generations 3"):
        plan_groups(100, load("rloo", num_generations=3), 1)
    assert plan_groups(100, load("rloo", num_generations=3), 3).answers_per_generation == 24
    with pytest.raises(ConfigError, match="3 prompts are fewer than the 4"):
        plan_groups(3, load("rloo"), 1)

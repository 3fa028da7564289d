"""Rollout schedule: iterations, steps, due events, order of prompts, random streams."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tests.planning.runs import build_config
from transformers import IntervalStrategy
from trl.trainer.utils import RepeatSampler

from recipes_lib.config.schema import CriticConfig, PPOConfig
from recipes_lib.errors import ConfigError
from recipes_lib.rl.rollout_schedule import Stream, choose_prompts, compute_group_schedule, compute_schedule

TRAINING = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2.0}


PPO = PPOConfig(num_ppo_epochs=3, num_mini_batches=2)


def plan_run(num_warm=0, world_size=1, ppo=PPO, **keys):
    critic = CriticConfig(critic_warmup_iterations=num_warm)
    return compute_schedule(100, SimpleNamespace(ppo=ppo, critic=critic, training={**TRAINING, **keys}), world_size)


def test_every_minibatch_of_every_epoch_is_an_optimizer_step():
    """TRL's former PPOTrainer counted ``num_ppo_epochs`` steps, independent of ``num_mini_batches``."""
    plan = plan_run(world_size=2)
    assert (plan.answers_per_step, plan.answers_per_iteration, plan.steps_per_iteration) == (16, 32, 6)
    assert plan.num_iterations == 7
    assert plan.num_epochs == pytest.approx(2.24)
    assert plan.num_steps == 42


def test_critic_warmup_as_long_as_run_raises():
    for num_warm in (0, 1):
        plan_run(num_warm, max_steps=12)
    with pytest.raises(ConfigError, match="the critic warm-up has 2 iterations, and the run has 2"):
        plan_run(2, max_steps=12)


@pytest.mark.parametrize(("num_warm", "num_warmup_steps"), [(0, 11), (1, 5)])
def test_learning_rate_warmup_leaves_a_step_of_the_policy(num_warm, num_warmup_steps):
    plan = plan_run(num_warm, max_steps=12, warmup_steps=0.9)
    assert (plan.num_idle_steps, plan.num_warmup_steps) == (6 * num_warm, num_warmup_steps)


@pytest.mark.parametrize(("max_steps", "num_iterations"), [(1, 1), (6, 1), (7, 2)])
def test_max_steps_is_rounded_up_to_whole_iterations(max_steps, num_iterations):
    assert plan_run(max_steps=max_steps).num_iterations == num_iterations


@pytest.mark.parametrize(
    ("every", "due"), [(1, [0, 1, 2, 3, 4]), (8, [1, 3, 4]), (0.5, [2, 4]), (1000, [4]), (5, [1, 2, 3, 4])]
)
def test_event_is_due_in_iteration_that_reaches_its_step(every, due):
    plan = plan_run(ppo=PPOConfig(num_ppo_epochs=1, num_mini_batches=4), max_steps=20)
    assert [iteration for iteration in range(5) if plan.is_due(every, iteration)] == due


@pytest.mark.parametrize(
    ("keys", "due"),
    [
        # 16 answers per iteration: prompt 100 is sampled in the seventh, prompt 200 in the thirteenth.
        ({}, [6, 12]),
        ({"num_train_epochs": 0.5}, [3]),
        # Two iterations, less than an epoch: only the end of the run.
        ({"max_steps": 12}, [1]),
    ],
)
def test_epoch_ends_in_iteration_that_samples_its_last_prompt(keys, due):
    plan = plan_run(**keys)
    found = [step for step in range(plan.num_iterations) if plan.is_strategy_due(IntervalStrategy.EPOCH, 500, step)]
    assert found == due
    assert not any(plan.is_strategy_due(IntervalStrategy.NO, 1, step) for step in range(plan.num_iterations))
    for step in range(plan.num_iterations):
        assert plan.is_strategy_due(IntervalStrategy.STEPS, 7, step) is plan.is_due(7, step)


def test_every_epoch_has_each_prompt_once_in_another_order():
    chosen = choose_prompts(10, 0, 30, seed=1)
    passes = [chosen[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert choose_prompts(10, 0, 10, seed=2) != passes[0]


@pytest.mark.parametrize(("first", "count"), [(0, 4), (7, 6), (10, 10), (19, 2), (3, 25)])
def test_choose_prompts_is_consistent_for_any_range(first, count):
    assert choose_prompts(10, first, count, seed=1) == choose_prompts(10, 0, 40, seed=1)[first : first + count]


def test_random_streams_do_not_collide():
    """numpy treats ``[seed, n]`` and ``[seed, n, 0]`` as the same seed: without stream numbers, minibatches and answers
    would have the same random numbers."""
    names = [[stream, number] for stream in (Stream.PROMPT, Stream.ANSWER) for number in range(20)]
    names += [[Stream.MINIBATCH, iteration, epoch] for iteration in range(20) for epoch in range(3)]
    assert len({np.random.default_rng([7, *name]).random() for name in names}) == len(names)


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
    plan = compute_group_schedule(num_prompts, load("grpo", **keys), world_size)
    accumulation = keys.get("gradient_accumulation_steps", 1)
    steps = keys.get("steps_per_generation", accumulation)
    batch_size = keys.get("per_device_train_batch_size", 8)
    answers = batch_size * steps * world_size
    assert plan.answers_per_iteration == answers
    assert plan.group == keys["num_generations"]
    sampler = RepeatSampler(
        range(num_prompts),
        mini_repeat_count=keys["num_generations"],
        batch_size=answers // keys["num_generations"],
        repeat_count=keys.get("num_iterations", 1) * steps,
    )
    num_batches = len(list(sampler)) // answers
    assert plan.num_steps == math.ceil(num_batches / accumulation) * keys.get("num_train_epochs", 1)


def test_default_group_sizes_match_trl():
    assert compute_group_schedule(100, load("rloo"), 1).group == 2
    assert compute_group_schedule(100, load("grpo"), 1).group == 8


def test_indivisible_answers_and_too_few_prompts_raise():
    with pytest.raises(ConfigError, match="8 answers at a time are not divisible into groups of num_generations 3"):
        compute_group_schedule(100, load("rloo", num_generations=3), 1)
    assert compute_group_schedule(100, load("rloo", num_generations=3), 3).answers_per_iteration == 24
    with pytest.raises(ConfigError, match="3 prompts are fewer than the 4"):
        compute_group_schedule(3, load("rloo"), 1)

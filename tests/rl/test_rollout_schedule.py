"""How long a run is, what falls into an iteration, and which prompts it takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from transformers import IntervalStrategy

from recipes_lib.config.schema import CriticConfig, PPOConfig
from recipes_lib.errors import ConfigError
from recipes_lib.rl.rollout_schedule import Stream, choose_prompts, compute_schedule

TRAINING = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2.0}


PPO = PPOConfig(num_ppo_epochs=3, num_mini_batches=2)


def plan_run(num_warm=0, world_size=1, ppo=PPO, **keys):
    critic = CriticConfig(critic_warmup_iterations=num_warm)
    return compute_schedule(100, SimpleNamespace(ppo=ppo, critic=critic, training={**TRAINING, **keys}), world_size)


def test_every_minibatch_is_an_optimizer_step():
    """TRL's old trainer made ``num_ppo_epochs`` steps, whatever ``num_mini_batches`` said."""
    plan = plan_run(world_size=2)
    assert (plan.answers_per_step, plan.answers_per_iteration, plan.steps_per_iteration) == (16, 32, 6)
    assert plan.num_iterations == 7
    assert plan.num_epochs == pytest.approx(2.24)
    assert plan.num_steps == 42


def test_a_run_that_ends_before_the_critic_is_warm_is_refused():
    for num_warm in (0, 1):
        plan_run(num_warm, max_steps=12)
    with pytest.raises(ConfigError, match="the critic warm-up has 2 iterations, and the run has 2"):
        plan_run(2, max_steps=12)


@pytest.mark.parametrize(("max_steps", "num_iterations"), [(1, 1), (6, 1), (7, 2)])
def test_a_part_of_an_iteration_is_a_whole_one(max_steps, num_iterations):
    assert plan_run(max_steps=max_steps).num_iterations == num_iterations


@pytest.mark.parametrize(
    ("every", "due"), [(1, [0, 1, 2, 3, 4]), (8, [1, 3, 4]), (0.5, [2, 4]), (1000, [4]), (5, [1, 2, 3, 4])]
)
def test_what_is_due_falls_into_the_iteration_that_reaches_it(every, due):
    plan = plan_run(ppo=PPOConfig(num_ppo_epochs=1, num_mini_batches=4), max_steps=20)
    assert [iteration for iteration in range(5) if plan.is_due(every, iteration)] == due


@pytest.mark.parametrize(
    ("keys", "due"),
    [
        # 16 answers an iteration: the 100th prompt is sampled in the seventh, the 200th in the thirteenth.
        ({}, [6, 12]),
        ({"num_train_epochs": 0.5}, [3]),
        # 32 of 100 prompts, twice: fewer than an epoch.
        ({"max_steps": 12}, [1]),
    ],
)
def test_an_epoch_ends_in_the_iteration_that_samples_its_last_prompt(keys, due):
    plan = plan_run(**keys)
    found = [step for step in range(plan.num_iterations) if plan.is_strategy_due(IntervalStrategy.EPOCH, 500, step)]
    assert found == due
    assert not any(plan.is_strategy_due(IntervalStrategy.NO, 1, step) for step in range(plan.num_iterations))


def test_every_pass_takes_each_prompt_once_in_an_order_of_its_own():
    chosen = choose_prompts(10, 0, 30, seed=1)
    passes = [chosen[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert choose_prompts(10, 0, 10, seed=2) != passes[0]


@pytest.mark.parametrize(("first", "count"), [(0, 4), (7, 6), (10, 10), (19, 2), (3, 25)])
def test_it_goes_on_wherever_it_stands(first, count):
    assert choose_prompts(10, first, count, seed=1) == choose_prompts(10, 0, 40, seed=1)[first : first + count]


def test_what_is_drawn_for_one_thing_is_never_drawn_for_another():
    """numpy takes ``[seed, n]`` and ``[seed, n, 0]`` for the same seed: without a stream of its own, the order of a
    minibatch would follow from the numbers that its answers were sampled with."""
    names = [[stream, number] for stream in (Stream.PROMPT, Stream.ANSWER) for number in range(20)]
    names += [[Stream.MINIBATCH, iteration, epoch] for iteration in range(20) for epoch in range(3)]
    assert len({np.random.default_rng([7, *name]).random() for name in names}) == len(names)

"""Iterations, rollouts and optimizer steps of a run of PPO, RLOO or GRPO."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from recipes_lib.config.schema import RecipeConfig, read_training
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.schedule import compute_steps, compute_warmup_steps


class Stream(enum.IntEnum):
    """Purposes of random numbers: each has its own stream under one seed."""

    PROMPT = 1
    ANSWER = 2
    MINIBATCH = 3


@dataclass(frozen=True, slots=True)
class RolloutSchedule:
    """Numbers of iterations, answers and steps of a run.

    Attributes:
        num_iterations: Iterations; each samples answers, then trains on them.
        answers_per_step: Answers per optimizer step, over all processes.
        answers_per_iteration: Answers sampled per iteration, over all processes.
        update_epochs: Epochs over the answers of an iteration.
        num_steps: Optimizer steps of the policy, and of the critic, including those that ``target_kl`` skips, so that
            length and learning rates do not depend on them.
        num_warmup_steps: Optimizer steps of the warm-up, fewer than those of the policy.
        num_epochs: Passes over the prompts, fractional.
        group: Answers per prompt, adjacent in an iteration.
        num_idle_steps: Optimizer steps before the first one of the policy, in which only the critic is trained.
    """

    num_iterations: int
    answers_per_step: int
    answers_per_iteration: int
    update_epochs: int
    num_steps: int
    num_warmup_steps: int
    num_epochs: float
    group: int = 1
    num_idle_steps: int = 0

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration; the last iteration may have fewer."""
        return self.answers_per_iteration * self.update_epochs // self.answers_per_step

    def count_steps(self, num_iterations: int) -> int:
        """Optimizer steps of the first iterations."""
        return min(num_iterations * self.steps_per_iteration, self.num_steps)

    def is_due(self, every: float, iteration: int) -> bool:
        """Return whether an event every ``every`` steps, or this share of all steps, is due in an iteration.

        Args:
            every: ``logging_steps``, ``save_steps`` or ``eval_steps``.
            iteration: Finished iteration, counted from 0.
        """
        period = max(1, math.ceil(every * self.num_steps)) if every < 1 else int(every)
        before, after = self.count_steps(iteration), self.count_steps(iteration + 1)
        # An iteration may have several steps; the event is due if any of them reaches a multiple of the period.
        return after // period > before // period or iteration + 1 == self.num_iterations

    def is_strategy_due(self, strategy: str, every: float, iteration: int) -> bool:
        """Return whether an event is due by ``eval_strategy`` or ``save_strategy``: ``no``, ``epoch`` or ``steps``.

        An epoch is a pass over the prompts; it ends in the iteration that samples the last of them.
        """
        if strategy == "epoch":
            # 1e-9 above rounding errors of a whole number.
            rate = self.num_epochs / self.num_steps
            before, after = (int(self.count_steps(done) * rate + 1e-9) for done in (iteration, iteration + 1))
            return after > before or iteration + 1 == self.num_iterations
        return strategy != "no" and self.is_due(every, iteration)


def compute_schedule(num_prompts: int, config: RecipeConfig, world_size: int) -> RolloutSchedule:
    """Count iterations and steps of a run of PPO; a partial iteration counts as a full one.

    Raises:
        ConfigError: The critic warm-up covers the whole run, so that the policy would never train.
    """
    ppo, training = config.ppo, config.training
    answers_per_step = compute_steps(None, training, world_size).rows_per_step
    answers_per_iteration = answers_per_step * ppo.num_mini_batches
    steps_per_iteration, max_steps = ppo.num_mini_batches * ppo.num_ppo_epochs, read_training(training, "max_steps")
    num_answers = read_training(training, "num_train_epochs") * num_prompts
    length = max_steps / steps_per_iteration if max_steps > 0 else num_answers / answers_per_iteration
    num_iterations = math.ceil(length)
    if num_iterations <= (warm := config.critic.critic_warmup_iterations) > 0:
        found = f"the critic warm-up has {warm} iterations, and the run has {num_iterations}"
        remedy = "lower it, or raise max_steps or num_train_epochs"
        raise ConfigError(Problem("critic_warmup_iterations", found, remedy))
    num_steps, num_idle_steps = num_iterations * steps_per_iteration, warm * steps_per_iteration
    num_warmup_steps = compute_warmup_steps(read_training(training, "warmup_steps"), num_steps)
    return RolloutSchedule(
        num_iterations=num_iterations,
        answers_per_step=answers_per_step,
        answers_per_iteration=answers_per_iteration,
        update_epochs=ppo.num_ppo_epochs,
        num_steps=num_steps,
        num_warmup_steps=min(num_warmup_steps, num_steps - num_idle_steps - 1),
        num_epochs=num_iterations * answers_per_iteration / num_prompts,
        num_idle_steps=num_idle_steps,
    )


def compute_group_schedule(num_prompts: int, config: RecipeConfig, world_size: int) -> RolloutSchedule:
    """Count the iterations and steps of RLOO or GRPO; an incomplete generation is dropped.

    If a step uses the answers of several generations, an iteration samples all of them.

    Raises:
        ConfigError: The answers of a generation are not divisible into groups or into optimizer steps, or there are
            fewer prompts than a generation needs.

    Source: ``RepeatSampler`` and ``get_train_dataloader`` of TRL's trainers, compared in
    ``tests/rl/test_rollout_schedule.py``.
    """

    def read(key: str) -> int:
        return int(config.read(key) or 0)

    update_epochs, group = read("num_iterations"), read("num_generations")
    steps_per_generation = read("steps_per_generation") or read("gradient_accumulation_steps")
    batch_size = read("per_device_train_batch_size") * world_size
    per_generation = batch_size * steps_per_generation
    prompts = per_generation // group
    if per_generation % group:
        found = f"{per_generation} answers at a time are not divisible into groups of num_generations {group}"
        remedy = "make per_device_train_batch_size times the steps and processes a multiple of it"
        raise ConfigError(Problem("num_generations", found, remedy))
    if num_prompts < prompts:
        found = f"{num_prompts} prompts are fewer than the {prompts} that are answered at a time"
        raise ConfigError(Problem("num_generations", found, "raise it, or answer fewer at a time"))
    num_batches = num_prompts // prompts * steps_per_generation * update_epochs
    steps = compute_steps(num_batches * batch_size, config.training, world_size)
    per_step, presented = steps.rows_per_step, per_generation * update_epochs
    answers = per_generation * max(1, per_step // presented)
    if answers * update_epochs % per_step:
        found = f"the {presented} answers of a generation are not divisible into steps of {per_step}"
        remedy = "make steps_per_generation x num_iterations a multiple or a divisor of gradient_accumulation_steps"
        raise ConfigError(Problem("steps_per_generation", found, remedy))
    return RolloutSchedule(
        num_iterations=math.ceil(steps.num_steps * per_step / (answers * update_epochs)),
        answers_per_step=per_step,
        answers_per_iteration=answers,
        update_epochs=update_epochs,
        num_steps=steps.num_steps,
        num_warmup_steps=steps.num_warmup_steps,
        num_epochs=steps.num_epochs,
        group=group,
    )


def choose_prompts(num_prompts: int, first: int, count: int, seed: int, group: int = 1) -> list[int]:
    """Return the prompts of answers ``first`` to ``first + count`` (exclusive); every epoch has its own order.

    Args:
        num_prompts: Prompts of the training set.
        first: Number of the first answer in the run.
        count: Number of answers.
        seed: Seed of the run.
        group: Answers per prompt, adjacent.

    Returns:
        Positions in the training set, one per answer.
    """
    # Numbers of prompts in the run, (count,), each as epoch and place in the order of that epoch.
    epochs, places = np.divmod(np.arange(first, first + count) // group, num_prompts)
    # One generator per epoch, so that any range can be computed without the ones before it.
    orders = {
        epoch: np.random.default_rng([seed, Stream.PROMPT, epoch]).permutation(num_prompts)
        for epoch in range(epochs[0], epochs[-1] + 1)
    }
    return [int(orders[epoch][place]) for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)]

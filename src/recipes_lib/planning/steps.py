"""Optimizer steps, tokens and learning rates of a run, counted before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes_lib.config.schema import RecipeConfig, read_training
from recipes_lib.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How many optimizer steps a run takes and what one of them holds.

    Attributes:
        num_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps of one pass over the data; 0 when the data have no known length.
        rows_per_step: Rows (packed or not) of one optimizer step over all processes: the effective batch.
        num_epochs: Passes over the data, fractional; 0 when the data have no known length.
        num_warmup_steps: Optimizer steps of the warm-up.
    """

    num_steps: int
    steps_per_epoch: int
    rows_per_step: int
    num_epochs: float
    num_warmup_steps: int


def compute_steps(num_rows: int | None, training: Mapping[str, Any], world_size: int) -> StepPlan:
    """Count the optimizer steps of a run from the number of prepared rows; ``num_rows`` None means streaming.

    Source: transformers ``Trainer.set_initial_training_values`` and ``TrainingArguments.get_warmup_steps``;
    see ``tests/planning/test_steps.py``, which asks the Trainer itself.

    Args:
        num_rows: Packed rows of the training set.
        training: Upstream's training keys; absent ones take upstream's defaults.
        world_size: Data-parallel processes.
    """
    batch_size = read_training(training, "per_device_train_batch_size")
    accumulation = read_training(training, "gradient_accumulation_steps")
    max_steps = read_training(training, "max_steps")
    rows_per_step = batch_size * accumulation * world_size
    steps_per_epoch = 0
    if num_rows is not None:
        rows_per_pass = batch_size * world_size
        drop_last = read_training(training, "dataloader_drop_last")
        num_batches = num_rows // rows_per_pass if drop_last else math.ceil(num_rows / rows_per_pass)
        steps_per_epoch = max(math.ceil(num_batches / accumulation), 1)
    num_steps = max_steps if max_steps > 0 else math.ceil(read_training(training, "num_train_epochs") * steps_per_epoch)
    return StepPlan(
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        rows_per_step=rows_per_step,
        num_epochs=num_steps / steps_per_epoch if steps_per_epoch else 0.0,
        num_warmup_steps=compute_warmup_steps(read_training(training, "warmup_steps"), num_steps),
    )


def compute_warmup_steps(warmup_steps: float, num_steps: int) -> int:
    """Return the warm-up in optimizer steps: a value below 1 is a share of ``num_steps``, rounded up."""
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(num_steps * warmup_steps)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Counts of a run.

    Attributes:
        answers_per_generation: Answers over all processes that are sampled before anything is learnt from them.
        prompts_per_generation: Prompts that they answer, ``num_generations`` times each.
        steps: Optimizer steps; its rows are answers.
    """

    answers_per_generation: int
    prompts_per_generation: int
    steps: StepPlan


def plan_groups(num_prompts: int, config: RecipeConfig, world_size: int) -> GroupPlan:
    """Count the answers and steps of a run over ``num_prompts`` prompts; what does not fill a generation is left out.

    Source: ``RepeatSampler`` and ``get_train_dataloader`` of TRL's trainers; ``tests/planning/test_groups.py`` asks
    them.

    Raises:
        ConfigError: The answers of a generation cannot be divided by the prompts, or there are too few prompts for one.
    """

    def read(key: str) -> int:
        return int(config.read(key) or 0)

    steps_per_generation = read("steps_per_generation") or read("gradient_accumulation_steps")
    batch_size = read("per_device_train_batch_size") * world_size
    answers, group = batch_size * steps_per_generation, read("num_generations")
    prompts = answers // group
    if answers % group:
        found = f"{answers} answers at a time are not divisible into groups of num_generations {group}"
        remedy = "make per_device_train_batch_size times the steps and processes a multiple of it"
        raise ConfigError(Problem("num_generations", found, remedy))
    if num_prompts < prompts:
        found = f"{num_prompts} prompts are fewer than the {prompts} that are answered at a time"
        raise ConfigError(Problem("num_generations", found, "raise it, or answer fewer at a time"))
    num_batches = num_prompts // prompts * steps_per_generation * read("num_iterations")
    return GroupPlan(answers, prompts, compute_steps(num_batches * batch_size, config.training, world_size))

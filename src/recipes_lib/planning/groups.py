"""How RLOO and GRPO count: several answers to each prompt, sampled together, and the steps that they are enough for."""

from __future__ import annotations

from dataclasses import dataclass

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.steps import StepPlan, compute_steps


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
        ConfigError: The answers of a generation do not share out among prompts, or there are too few prompts for one.
    """

    def read(key: str) -> int:
        return int(config.read(key) or 0)

    steps_per_generation = read("steps_per_generation") or read("gradient_accumulation_steps")
    batch_size = read("per_device_train_batch_size") * world_size
    answers, group = batch_size * steps_per_generation, read("num_generations")
    prompts = answers // group
    if answers % group:
        found = f"{answers} answers at a time are no groups of num_generations {group}"
        remedy = "make per_device_train_batch_size times the steps and processes a multiple of it"
        raise ConfigError(Problem("num_generations", found, remedy))
    if num_prompts < prompts:
        found = f"{num_prompts} prompts are fewer than the {prompts} that are answered at a time"
        raise ConfigError(Problem("num_generations", found, "raise it, or answer fewer at a time"))
    num_batches = num_prompts // prompts * steps_per_generation * read("num_iterations")
    return GroupPlan(answers, prompts, compute_steps(num_batches * batch_size, config.training, world_size))

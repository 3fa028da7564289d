"""The plan of a pretraining run: rows, learning rate and data mixture of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.schedule import RowStarts, Schedule, build_schedule, compute_row_starts

Phase = tuple[int, Sequence[float]]
"""First row of a phase of the curriculum, and the sampling weight of each source in it."""


@dataclass(frozen=True, slots=True, eq=False)
class PretrainingPlan:
    """Rows, learning rate and data mixture of every step; ``check``, ``plan`` and training use the same plan.

    Attributes:
        max_length: Tokens per row.
        rows_per_micro_step: Rows of one forward and backward pass over all processes.
        rows_per_step: Rows of a full optimizer step.
        row_starts: Rows trained on before each step, ``int64 (num_steps + 1,)``.
        schedule: Learning rate of each step.
        phases: Data mixture by first row.
    """

    max_length: int
    rows_per_micro_step: int
    rows_per_step: int
    row_starts: RowStarts
    schedule: Schedule
    phases: Sequence[Phase]

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.row_starts) - 1

    @property
    def num_rows(self) -> int:
        """Number of rows of all steps."""
        return int(self.row_starts[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all steps."""
        return self.num_rows * self.max_length


def plan_pretraining(
    config: RecipeConfig, world_size: int, *, num_windows: int | None = None, weights: Sequence[float] = (1.0,)
) -> PretrainingPlan:
    """Plan a pretraining run.

    Args:
        config: Configuration of the run.
        world_size: Data-parallel processes.
        num_windows: Total number of rows of all sources; required for a run whose length is given in epochs.
        weights: Sampling weight of each source without a curriculum, summing to 1. Sources after those of the
            curriculum are replayed, and keep their weight in each of its phases.

    Raises:
        ConfigError: Warm-up and decay are longer than the run, or it has too many steps to be planned.
    """
    training, pretraining, schedule = config.training, config.pretraining, config.schedule
    max_length = config.tokens.max_length
    assert max_length is not None
    rows_per_micro_step = config.read("per_device_train_batch_size") * world_size
    accumulation = config.read("gradient_accumulation_steps")
    rows_per_step = rows_per_micro_step * accumulation
    row_starts = compute_row_starts(
        max_length=max_length,
        rows_per_micro_step=rows_per_micro_step,
        accumulation=accumulation,
        ramp_tokens=schedule.batch_ramp_tokens,
        ramp_start=schedule.batch_ramp_start,
        **_read_length(config, num_windows, max_length),
    )
    curriculum = pretraining.dataset_curriculum or [{"start_tokens": 0, "weights": weights}]
    # A phase begins with the first whole row after its tokens; a phase after the end of the run never begins.
    phases = [
        (math.ceil(phase["start_tokens"] / max_length), _add_replayed(phase["weights"], weights))
        for phase in curriculum
    ]
    return PretrainingPlan(
        max_length=max_length,
        rows_per_micro_step=rows_per_micro_step,
        rows_per_step=rows_per_step,
        row_starts=row_starts,
        schedule=build_schedule(schedule, training, row_starts, max_length, rows_per_step),
        phases=phases,
    )


def _add_replayed(phase: Sequence[float], weights: Sequence[float]) -> Sequence[float]:
    """Return the weights of a phase, including those of replayed sources."""
    replayed = weights[len(phase) :]
    if not replayed:
        return phase
    return [weight / sum(phase) * (1 - sum(replayed)) for weight in phase] + [*replayed]


def count_run_tokens(config: RecipeConfig, world_size: int) -> int | None:
    """Return the tokens of a run, or ``None`` if its length is given in epochs and so depends on its data."""
    if config.pretraining.max_tokens is None and config.read("max_steps") <= 0:
        return None
    return plan_pretraining(config, world_size).num_tokens


def _read_length(config: RecipeConfig, num_windows: int | None, max_length: int) -> dict[str, Any]:
    """Return the length of a run as an argument of ``compute_row_starts``."""
    if config.pretraining.max_tokens is not None:
        return {"num_tokens": config.pretraining.max_tokens}
    if (max_steps := config.read("max_steps")) > 0:
        return {"num_steps": max_steps}
    assert num_windows is not None, "a length in epochs depends on the data"
    return {"num_tokens": math.ceil(config.read("num_train_epochs") * num_windows) * max_length}

"""Optimizer steps, learning-rate schedules, batch ramp and pretraining plan, known for every step in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from recipes_lib.config.schema import RecipeConfig, ScheduleConfig, read_training
from recipes_lib.errors import ConfigError, Problem

RowStarts = np.ndarray[Any, np.dtype[np.int64]]
"""Rows trained on before each optimizer step, ``int64 (num_steps + 1,)``: the first is 0, the last all of the run."""


_MAX_STEPS: Final = 100_000_000
"""Largest number of planned steps: a schedule needs about 32 bytes of each, and no run has as many."""


def compute_row_starts(
    *,
    max_length: int,
    rows_per_micro_step: int,
    accumulation: int,
    num_steps: int | None = None,
    num_tokens: int | None = None,
    ramp_tokens: int | None = None,
    ramp_start: float = 1.0,
) -> RowStarts:
    """Return the number of rows before each optimizer step of a run, ``int64 (num_steps + 1,)``.

    On the batch ramp, the share of the full batch grows linearly in tokens, from ``ramp_start`` to 1 over
    ``ramp_tokens``. A step uses the share at its first token, rounded up to whole micro-batches. No step depends on the
    length of the run: a longer run has the same beginning.

    Args:
        max_length: Tokens per row.
        rows_per_micro_step: Rows of one forward and backward pass over all processes.
        accumulation: Micro-batches of a full optimizer step.
        num_steps: Length of the run in optimizer steps; exactly one of this and ``num_tokens`` is required.
        num_tokens: Length of the run in tokens; the last step is the first to reach it.
        ramp_tokens: Tokens over which the batch grows; ``None`` for full batches from the first step.
        ramp_start: Share of the full batch at the first step, above 0 and at most 1.

    Raises:
        ConfigError: The run has more than 10^8 steps.

    Source: Brown et al. 2020 (GPT-3), appendix B, in tokens; against a loop over the steps in
    ``tests/planning/test_batch_ramp.py``.
    """
    assert (num_steps is None) != (num_tokens is None), "a run has one length"
    first_size = accumulation if ramp_tokens is None else count_micro_steps(accumulation, ramp_start)
    sizes = range(first_size, accumulation + 1)
    counts: list[int] = []
    tokens = 0
    # All steps of one size at once: there are at most `accumulation` sizes, but possibly millions of steps.
    for size in sizes:
        step_tokens = size * rows_per_micro_step * max_length
        count = -(-(num_tokens - tokens) // step_tokens) if num_tokens is not None else (num_steps or 0) - sum(counts)
        if ramp_tokens is not None and size < accumulation:
            last_token = _find_last_token(size, accumulation, ramp_tokens, ramp_start)
            count = min(count, (last_token - tokens) // step_tokens + 1)
        # Never below 0: the surplus is less than one step of the previous size, and this size is larger.
        counts.append(count)
        tokens += count * step_tokens
    if sum(counts) > _MAX_STEPS:
        found = f"the run would have {sum(counts):,} optimizer steps, more than can be planned one by one"
        remedy = "write --num_processes as the run will have them, or larger steps (gradient_accumulation_steps)"
        raise ConfigError(Problem("max_tokens", found, remedy))
    # (num_steps,) rows of each step; int64, because billions of rows exceed int32.
    rows = np.repeat(np.asarray(sizes, dtype=np.int64) * rows_per_micro_step, counts)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows)])


def count_micro_steps(accumulation: int, share: float) -> int:
    """Return the micro-batches of an optimizer step with ``share`` (above 0) of the full batch, rounded up."""
    return math.ceil(_read_share(share) * accumulation)


def _find_last_token(size: int, accumulation: int, ramp_tokens: int, ramp_start: float) -> int:
    """Return the last token of the ramp at which ``size`` micro-batches, fewer than ``accumulation``, are enough."""
    start = _read_share(ramp_start)
    return math.floor(ramp_tokens * (Fraction(size, accumulation) - start) / (1 - start))


def _read_share(share: float) -> Fraction:
    """Return the share as an exact decimal: as a float, 0.07 of 100 is 7.000000000000001, which would round up to 8."""
    return Fraction(str(share))


_Factors = np.ndarray[Any, np.dtype[np.float64]]
_Tokens = np.ndarray[Any, np.dtype[np.int64]]

_SHAPES: Final[Mapping[str, Callable[[_Factors, float], _Factors]]] = {
    "constant": lambda progress, floor: np.ones_like(progress),
    "linear": lambda progress, floor: 1 - (1 - floor) * progress,
    "cosine": lambda progress, floor: floor + (1 - floor) / 2 * (1 + np.cos(np.pi * progress)),
    "1-sqrt": lambda progress, floor: 1 - (1 - floor) * np.sqrt(progress),
    "exponential": lambda progress, floor: floor**progress,
}
"""Factor of the learning rate by name, from the progress of the decay in [0, 1] and the floor."""

_BATCH_EXPONENTS: Final[Mapping[str, float]] = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}


def list_quarters(num_steps: int) -> list[int]:
    """Return the optimizer steps at 0, 25, 50, 75 and 100 % of a run, whose learning rates are shown."""
    return [round(share * (num_steps - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]


def compute_learning_rates(
    peak: float, training: Mapping[str, Any], num_steps: int, num_warmup_steps: int, steps: Sequence[int]
) -> list[float] | None:
    """Return the learning rate of each of ``steps``, by the schedule that the Trainer builds.

    Args:
        peak: ``learning_rate``.
        training: Keys of ``TrainingArguments``.
        num_steps: Optimizer steps of the run.
        num_warmup_steps: Optimizer steps of the warm-up.
        steps: Steps, counted from 0.

    Returns:
        One learning rate per step; ``None`` for a schedule that depends on the run, such as ``reduce_lr_on_plateau``.

    Raises:
        ConfigError: As ``verify_schedule``.

    Source: transformers ``Trainer.create_scheduler``; see ``tests/planning/test_schedule.py``.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = get_scheduler(
        read_training(training, "lr_scheduler_type"),
        optimizer=optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=training.get("lr_scheduler_kwargs"),
    )
    verify_schedule(schedule, num_steps)
    if not isinstance(schedule, LambdaLR):
        return None
    return [float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step)) for step in steps]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The learning rate of every step of a pretraining run as a share of its peak: a pure function of the step.

    Measured in tokens ``t`` trained on before the step, so that a growing batch is no special case. With ``W`` tokens
    of warm-up, ``T`` of the run, ``D`` of the decay and the floor ``r``, it is ``min(1, (t + batch) / W)`` while
    ``t < W``, and then, with ``p = (t - W) / (T - W)`` and ``q = (t - (T - D)) / D``::

        constant             1
        linear               1 - (1 - r) p
        cosine               r + (1 - r) (1 + cos(pi p)) / 2
        inverse_sqrt         max(r, sqrt(W / t)) with W at least one step; continues past the end
        warmup_stable_decay  1 while q < 0, and then by decay_type
            linear           1 - (1 - r) q
            cosine           r + (1 - r) (1 + cos(pi q)) / 2
            1-sqrt           1 - (1 - r) sqrt(q)
            exponential      r ** q

    times a power of the batch as a share of the full one: 0, 1/2 or 1 by ``batch_ramp_lr``.

    Attributes:
        kind: Upstream's ``lr_scheduler_type``.
        decay_type: Shape of the decay of ``warmup_stable_decay``.
        min_ratio: The floor ``r``.
        warmup_tokens: ``W``.
        decay_tokens: ``D``; 0 for other kinds than ``warmup_stable_decay``.
        batch_exponent: Exponent of the batch's share of the full batch, a further factor.
        full_tokens: Tokens of a full batch.
        token_starts: Tokens trained on before each step, ``int64 (num_steps + 1,)``.

    Source: Brown et al. 2020 (GPT-3), appendix B (in tokens, cosine to a floor); Vaswani et al. 2017, equation 3
    (inverse square root); Hu et al. 2024 (MiniCPM), section 4 (stable, then exponential); Hägele et al. 2024 (1-sqrt);
    Malladi et al. 2022 (the square root of the batch, for Adam). Against transformers' ``get_scheduler`` wherever the
    definitions coincide in ``tests/planning/test_schedule.py``.
    """

    kind: str
    decay_type: str
    min_ratio: float
    warmup_tokens: int
    decay_tokens: int
    batch_exponent: float
    full_tokens: int
    token_starts: _Tokens

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return len(self.token_starts) - 1

    @property
    def num_warmup_steps(self) -> int:
        """Number of optimizer steps that begin during the warm-up."""
        return int(np.searchsorted(self.token_starts[:-1], self.warmup_tokens))

    @property
    def first_decay_step(self) -> int | None:
        """First step of the decay of ``warmup_stable_decay``, the last with the peak learning rate; otherwise ``None``.

        A checkpoint of at most this many steps can be resumed in a longer run, with the same result as a longer run
        from the start.
        """
        if self.kind != "warmup_stable_decay":
            return None
        return int(np.searchsorted(self.token_starts, self.token_starts[-1] - self.decay_tokens))

    def __call__(self, step: int) -> float:
        """Return the factor of one step, counted from 0, in [0, 1]."""
        return float(self.factors([step])[0])

    def factors(self, steps: Sequence[int] | _Tokens) -> _Factors:
        """Return the factor of each of ``steps``, counted from 0: ``float64`` in [0, 1], one per step.

        Past the end of the run batches are full, and the factor is the floor, or 1 for ``constant``.
        """
        numbers = np.asarray(steps, dtype=np.int64)
        is_past = numbers >= self.num_steps
        inside = np.minimum(numbers, self.num_steps - 1)
        past = self.token_starts[-1] + (numbers - self.num_steps) * self.full_tokens
        tokens = np.where(is_past, past, self.token_starts[inside])
        batch = np.where(is_past, self.full_tokens, self.token_starts[inside + 1] - self.token_starts[inside])
        # With `t` alone, the first step of the warm-up would have a learning rate of 0.
        rising = np.minimum(1.0, (tokens + batch) / max(self.warmup_tokens, 1))
        factor = np.where(tokens < self.warmup_tokens, rising, self._compute_falling(tokens))
        return np.asarray(factor * (batch / self.full_tokens) ** self.batch_exponent)

    def _compute_falling(self, tokens: _Tokens) -> _Factors:
        """Return the factor after the warm-up by trained tokens, before scaling by the batch size."""
        end = int(self.token_starts[-1])
        if self.kind == "inverse_sqrt":
            scale = max(self.warmup_tokens, int(self.token_starts[1]))
            return np.maximum(self.min_ratio, np.sqrt(scale / np.maximum(tokens, scale)))
        shape, begin = self.kind, self.warmup_tokens
        if self.kind == "warmup_stable_decay":
            shape, begin = self.decay_type, end - self.decay_tokens
        # If the warm-up is as long as the run, there is no decay, and the divisor would be 0.
        progress = np.where(tokens >= end, 1.0, np.clip((tokens - begin) / max(end - begin, 1), 0.0, 1.0))
        return np.asarray(_SHAPES[shape](progress, self.min_ratio))


def build_schedule(
    schedule: ScheduleConfig, training: Mapping[str, Any], row_starts: RowStarts, max_length: int, rows_per_step: int
) -> Schedule:
    """Build the schedule of a pretraining run of at least one step.

    Args:
        schedule: This library's schedule keys.
        training: Keys of ``TrainingArguments``.
        row_starts: Rows trained on before each optimizer step, from ``compute_row_starts``.
        max_length: Tokens per row.
        rows_per_step: Rows of a full optimizer step, which the run may never reach.

    Raises:
        ConfigError: The warm-up and the decay are longer than the run.
    """
    token_starts = row_starts * max_length
    kind, warmup_tokens = str(read_training(training, "lr_scheduler_type")), schedule.warmup_tokens
    if warmup_tokens is None:
        warmup_tokens = _count_tokens(read_training(training, "warmup_steps"), token_starts)
    is_stable = kind == "warmup_stable_decay"
    built = Schedule(
        kind=kind,
        decay_type=schedule.decay_type,
        min_ratio=schedule.min_lr_ratio,
        warmup_tokens=warmup_tokens,
        decay_tokens=_count_tokens(schedule.decay_steps, token_starts[-1] - token_starts[::-1]) if is_stable else 0,
        batch_exponent=_BATCH_EXPONENTS[schedule.batch_ramp_lr],
        full_tokens=rows_per_step * max_length,
        token_starts=token_starts,
    )
    if built.warmup_tokens + built.decay_tokens > int(token_starts[-1]):
        found = (
            f"the warm-up and the decay are longer than the run ({built.num_steps} steps, {token_starts[-1]} tokens)"
        )
        remedy = "lower warmup_steps or warmup_tokens, or decay_steps; or train longer"
        raise ConfigError(Problem("lr_scheduler_type", found, remedy))
    return built


def agree_until(first: Schedule, second: Schedule, step: int) -> bool:
    """Return whether two schedules have bit-identical factors at every step below ``step``.

    A run may resume from a checkpoint of ``n`` steps with another schedule if both agree below ``n + 1``, because the
    optimizer state already has the learning rate of the next step.
    """
    steps = np.arange(step)
    return bool(np.array_equal(first.factors(steps), second.factors(steps)))


def _count_tokens(steps: float, tokens: _Tokens) -> int:
    """Return the tokens of a number or share of steps, from those of 0, 1, 2 ... steps."""
    number = _count_steps(steps, len(tokens) - 1)
    # More steps than the run has get more tokens, which `build_schedule` refuses.
    return int(tokens[number] if number < len(tokens) else tokens[-1] + 1)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Optimizer steps of a run, and rows of a step.

    Attributes:
        num_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps per epoch; 0 if the number of rows is unknown.
        rows_per_step: Global batch size: rows (packed or not) of an optimizer step over all processes.
        num_epochs: Epochs, fractional; 0 if the number of rows is unknown.
        num_warmup_steps: Optimizer steps of the warm-up.
    """

    num_steps: int
    steps_per_epoch: int
    rows_per_step: int
    num_epochs: float
    num_warmup_steps: int


def compute_steps(num_rows: int | None, training: Mapping[str, Any], world_size: int) -> StepPlan:
    """Compute the optimizer steps of a run.

    Args:
        num_rows: Rows of the training set, after packing; ``None`` if unknown, as with streaming.
        training: Keys of ``TrainingArguments``; absent ones take their defaults.
        world_size: Data-parallel processes.

    Raises:
        ConfigError: ``dataloader_drop_last`` drops all rows, or the warm-up is as long as the run.

    Source: transformers ``Trainer.set_initial_training_values`` and ``TrainingArguments.get_warmup_steps``;
    ``tests/planning/test_steps.py`` compares with the Trainer.
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
        # Upstream would end training at step 0 without an error.
        if drop_last and not num_batches:
            found = (
                f"drops all {num_rows:,} rows: they are fewer than the {rows_per_pass:,} of a batch of all processes"
            )
            raise ConfigError(Problem("dataloader_drop_last", found, "delete the line, or use smaller batches"))
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
    """Return the warm-up in optimizer steps.

    A fraction leaves one step of the run: rounded up, it could cover all of them, and a run of one step, whose learning
    rate would be 0, would change nothing.

    Args:
        warmup_steps: Number of steps, or below 1 a fraction of ``num_steps``.
        num_steps: Optimizer steps of the run; 0 if unknown.

    Raises:
        ConfigError: The warm-up is as long as the run.
    """
    if warmup_steps >= 1 and 0 < num_steps <= warmup_steps:
        found = f"the warm-up ({warmup_steps:g} steps) is as long as the run ({num_steps} steps)"
        raise ConfigError(Problem("warmup_steps", found, "write a share, such as `warmup_steps: 0.03`"))
    count = _count_steps(warmup_steps, num_steps)
    return min(count, num_steps - 1) if num_steps else count


def _count_steps(steps: float, num_steps: int) -> int:
    """Return a number of steps, of which a value below 1 is a fraction of ``num_steps``, rounded up."""
    return int(steps) if steps >= 1 else math.ceil(num_steps * steps)


def verify_schedule(scheduler: Any, num_steps: int) -> None:
    """Verify that the learning rate of a scheduler is 0 in at most 1 % of the steps after the first.

    A warm-up begins at 0, and some schedules end there or touch it.

    Args:
        scheduler: Scheduler of torch; passes if its learning rates depend on the run.
        num_steps: Optimizer steps of the run.

    Raises:
        ConfigError: The schedule ends long before the run.
    """
    if isinstance(scheduler, LambdaLR):
        steps = range(1, num_steps, max(1, num_steps // 1000))
        idle = sum(scheduler.lr_lambdas[0](step) == 0 for step in steps)
        if idle > max(1, len(steps) / 100):
            found = f"the learning rate is 0 in {idle / len(steps):.0%} of the {num_steps:,} steps"
            remedy = "lengthen the schedule by `lr_scheduler_kwargs`, or shorten the run (`max_steps`)"
            raise ConfigError(Problem("lr_scheduler_type", found, remedy))


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
    num_tokens, max_steps = pretraining.max_tokens, config.read("max_steps")
    if num_tokens is None and max_steps <= 0:
        assert num_windows is not None, "a length in epochs depends on the data"
        num_tokens = math.ceil(config.read("num_train_epochs") * num_windows) * max_length
    row_starts = compute_row_starts(
        max_length=max_length,
        rows_per_micro_step=rows_per_micro_step,
        accumulation=accumulation,
        ramp_tokens=schedule.batch_ramp_tokens,
        ramp_start=schedule.batch_ramp_start,
        num_steps=max_steps if num_tokens is None else None,
        num_tokens=num_tokens,
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
    """Return the tokens of a run, or ``None`` if its length is given in epochs and so depends on its data.

    Raises:
        ConfigError: As ``plan_pretraining``.
    """
    if config.pretraining.max_tokens is None and config.read("max_steps") <= 0:
        return None
    return plan_pretraining(config, world_size).num_tokens

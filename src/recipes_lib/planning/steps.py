"""Optimizer steps, tokens and learning rates of a run, counted before it starts and in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    batch_size = training.get("per_device_train_batch_size", 8)
    accumulation = training.get("gradient_accumulation_steps", 1)
    max_steps = training.get("max_steps", -1)
    rows_per_step = batch_size * accumulation * world_size
    steps_per_epoch = 0
    if num_rows is not None:
        rows_per_pass = batch_size * world_size
        drop_last = training.get("dataloader_drop_last", False)
        num_batches = num_rows // rows_per_pass if drop_last else math.ceil(num_rows / rows_per_pass)
        steps_per_epoch = max(math.ceil(num_batches / accumulation), 1)
    num_steps = max_steps if max_steps > 0 else math.ceil(training.get("num_train_epochs", 3.0) * steps_per_epoch)
    return StepPlan(
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        rows_per_step=rows_per_step,
        num_epochs=num_steps / steps_per_epoch if steps_per_epoch else 0.0,
        num_warmup_steps=compute_warmup_steps(training.get("warmup_steps", 0), num_steps),
    )


def compute_warmup_steps(warmup_steps: float, num_steps: int) -> int:
    """Return the warm-up in optimizer steps: a value below 1 is a share of ``num_steps``, rounded up."""
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(num_steps * warmup_steps)

"""The learning rate of every step, known before the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler


def compute_learning_rates(
    training: Mapping[str, Any], num_steps: int, num_warmup_steps: int, steps: Sequence[int]
) -> list[float] | None:
    """Return the learning rate that each of ``steps`` will use, by the schedule that the Trainer will build.

    Args:
        training: Upstream's training keys.
        num_steps: Optimizer steps of the run.
        num_warmup_steps: Optimizer steps of the warm-up.
        steps: Steps counted from 0.

    Returns:
        ``None`` for a schedule that reacts to the run and cannot be known before it.

    Source: transformers ``Trainer.create_scheduler``; see ``tests/planning/test_schedule.py``.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.get("learning_rate", 2e-5))
    schedule = get_scheduler(
        training.get("lr_scheduler_type", "linear"),
        optimizer=optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=training.get("lr_scheduler_kwargs"),
    )
    if not isinstance(schedule, LambdaLR):
        return None
    return [float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step)) for step in steps]

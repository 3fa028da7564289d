"""A run that is made longer: from which checkpoint it can go on as if it had been that long from the beginning."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError
from recipes_lib.planning.pretraining import PretrainingPlan, plan_pretraining
from recipes_lib.planning.schedule import agree_until
from recipes_lib.training.checkpoints import is_complete, list_checkpoints

EXTENDABLE: Final = frozenset(
    {
        "batch_ramp_lr",
        "decay_steps",
        "decay_type",
        "lr_scheduler_type",
        "max_steps",
        "max_tokens",
        "min_lr_ratio",
        "warmup_steps",
        "warmup_tokens",
    }
)
"""Keys of the length and the schedule: what they change lies in the future where the learning rates so far agree."""


def find_common_checkpoint(
    config: RecipeConfig,
    before: Mapping[str, Any],
    differing: Collection[str],
    *,
    world_size: int,
    world_size_before: int,
) -> Path | None:
    """Return the newest complete checkpoint that the run as it was and as it is now would both have made.

    They would when every step up to it had the same rows and the same learning rate. A ``warmup_stable_decay`` run
    always has one at the start of its decay, so that it can be made longer without warming up again.

    Args:
        config: The run now.
        before: Its keys as they were, from ``run.json``.
        differing: Names of the keys that differ.
        world_size: Data-parallel processes now.
        world_size_before: Data-parallel processes then.

    Returns:
        ``None``: another key differs, the run is none of pretraining, or no such checkpoint is left.

    Source: ``tests/training/test_extension.py``.
    """
    if config.stage != "pretrain" or not set(differing) <= EXTENDABLE:
        return None
    try:
        now = plan_pretraining(config, world_size)
        then = plan_pretraining(_restore(config, before, differing), world_size_before)
    except (AssertionError, ConfigError):  # Epochs are counted by the data, which are not opened yet.
        return None
    checkpoints = list_checkpoints(Path(config.training["output_dir"]))
    common = (path for step, path in checkpoints if is_complete(path) and _is_common(now, then, step))
    return next(common, None)


def _is_common(now: PretrainingPlan, then: PretrainingPlan, step: int) -> bool:
    if step >= now.num_steps:
        return False
    has_same_rows = np.array_equal(now.row_starts[: step + 1], then.row_starts[: step + 1])
    # The optimizer in a checkpoint already holds the rate of the step after it.
    return has_same_rows and agree_until(now.schedule, then.schedule, step + 1)


def _restore(config: RecipeConfig, before: Mapping[str, Any], keys: Collection[str]) -> RecipeConfig:
    """The configuration with the values that some keys had."""
    training = {name: value for name, value in config.training.items() if name not in keys}
    restored: dict[str, Any] = {}
    for section in ("pretraining", "schedule"):
        current = getattr(config, section)
        names = {field.name for field in dataclasses.fields(current)} & set(keys)
        restored[section] = dataclasses.replace(current, **{name: before[name] for name in names})
        keys = set(keys) - names
    training |= {name: before[name] for name in keys if before.get(name) is not None}
    return dataclasses.replace(config, training=training, **restored)

"""Disk space of a run's checkpoints, and whether there is enough."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes_lib.config.schema import read_training
from recipes_lib.config.table import read_lists
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.quantities import format_bytes, pluralize

_OPTIMIZERS: Final[Mapping[str, float]] = read_lists(Path(__file__).with_name("optimizers.yaml"))
_TWO_STATES: Final = 8
"""Bytes of two states in ``float32``, as of Adam: those of optimizers that are not listed."""
_LIKE_WEIGHTS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "muon")
"""Optimizers whose states have the dtype of the weights; those of the others have a fixed dtype."""


class DiskPlan(NamedTuple):
    """Disk space that a run will use.

    Attributes:
        checkpoint_bytes: One checkpoint: weights and optimizer states.
        num_checkpoints: Largest number of checkpoints on disk at once, including the one being written.
        total_bytes: Bytes of these checkpoints and the final model.
        free_bytes: Free bytes on the disk of ``output_dir``.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    total_bytes: int
    free_bytes: int


def plan_disk(
    checkpoint_bytes: int,
    model_bytes: int,
    num_steps: int,
    training: Mapping[str, Any],
    *,
    keep_every: int | None = None,
    num_protected: int = 0,
    num_epochs: float | None = None,
) -> DiskPlan:
    """Compute the disk space of a run from the size of a checkpoint.

    Args:
        checkpoint_bytes: Bytes of one checkpoint.
        model_bytes: Bytes of the final model.
        num_steps: Optimizer steps of the run.
        training: Keys of ``TrainingArguments``.
        keep_every: ``save_keep_steps``.
        num_protected: Number of checkpoints that are kept in addition to ``save_total_limit``.
        num_epochs: Epochs of the run; ``None`` for ``num_train_epochs``, or 1 if ``max_steps`` ends the run.
    """
    limit = training.get("save_total_limit")
    num_checkpoints = _count_saves(num_steps, training, num_epochs)
    if limit is not None:
        num_best = 1 if training.get("metric_for_best_model") or training.get("load_best_model_at_end") else 0
        num_forever = num_steps // keep_every if keep_every else 0
        num_checkpoints = min(num_checkpoints, limit + 1 + num_best + num_forever + num_protected)
    output = Path(training["output_dir"]).absolute()
    return DiskPlan(
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=num_checkpoints,
        total_bytes=checkpoint_bytes * num_checkpoints + model_bytes,
        free_bytes=shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free,
    )


def verify_disk(plan: DiskPlan, output_dir: str) -> None:
    """Raise if checkpoints and model of a run do not fit on the disk.

    Raises:
        ConfigError: The disk of ``output_dir`` has too little free space.
    """
    if plan.total_bytes > plan.free_bytes:
        found = (
            f"{pluralize(plan.num_checkpoints, 'checkpoint')} of {format_bytes(plan.checkpoint_bytes)} and the model "
            f"need {format_bytes(plan.total_bytes)} and the disk has {format_bytes(plan.free_bytes)}"
        )
        raise ConfigError(Problem(output_dir, found, "lower save_total_limit, or choose another output_dir"))


def count_state_bytes(training: Mapping[str, Any], weight_bytes: int) -> float:
    """Return the bytes of optimizer states per parameter of ``weight_bytes``."""
    optim = str(read_training(training, "optim"))
    size: float = next((size for name, size in _OPTIMIZERS.items() if name in optim), _TWO_STATES)
    if optim == "sgd":
        size = 4 if "momentum" in str(training.get("optim_args")) else 0
    return size * weight_bytes / 4 if optim in _LIKE_WEIGHTS else size


def _count_saves(num_steps: int, training: Mapping[str, Any], num_epochs: float | None) -> int:
    # `best` saves at evaluations.
    event = "eval" if read_training(training, "save_strategy") == "best" else "save"
    strategy = str(read_training(training, f"{event}_strategy"))
    if strategy == "no":
        return 0
    if strategy != "steps":
        if num_epochs is None:
            num_epochs = 1 if read_training(training, "max_steps") > 0 else read_training(training, "num_train_epochs")
        # An incomplete last epoch is saved too.
        return min(num_steps, max(1, math.ceil(num_epochs)))
    # Upstream evaluates at every logged step by default.
    every: float = read_training(training, f"{event}_steps") or training["logging_steps"]
    return -(-num_steps // max(1, round(every if every >= 1 else every * num_steps)))

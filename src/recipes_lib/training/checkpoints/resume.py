"""Resume: one checkpoint agreed by all ranks, the global batch size kept, runs extended."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import set_seed

from recipes_lib.config.schema import RecipeConfig, read_training
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.pretraining import PretrainingPlan, plan_pretraining
from recipes_lib.planning.schedule import agree_until
from recipes_lib.training.checkpoints.manifest import Record, find_damage, is_complete, list_checkpoints, put_aside
from recipes_lib.training.collectives import broadcast_object, gather_objects
from recipes_lib.training.layouts.launch_environment import Launch

BATCH_KEYS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Keys whose product with the world size is the global batch size; only the product affects the result."""

GENERATION_KEY: Final = "steps_per_generation"
"""Micro-batches for which answers are sampled together, where that is another number than those of a step."""


def count_rows_per_step(training: Mapping[str, Any], world_size: int) -> int:
    """Return the rows of an optimizer step over all processes and micro-batches.

    Args:
        training: Upstream's training keys; absent ones take upstream's defaults.
        world_size: Data-parallel processes.
    """
    per_device: int = read_training(training, "per_device_train_batch_size")
    accumulation: int = read_training(training, "gradient_accumulation_steps")
    return per_device * accumulation * world_size


def verify_checkpoint_fits(record: Record, name: str, launch: Launch) -> None:
    """Raise if this launch cannot load a checkpoint.

    Args:
        record: Of the checkpoint.
        name: Of its folder.
        launch: How the processes are started now.

    Raises:
        ConfigError: It was written under DeepSpeed and this is another engine, or the other way round: any number of
            processes reads all others, with FSDP2 and without; or it is DeepSpeed's and of another number of processes.
    """
    engine, world_size = record.get("engine", ""), record.get("world_size", launch.world_size)
    if engine != launch.engine and "DEEPSPEED" in (engine, launch.engine):
        found = f"was written under {engine or 'no sharding engine'} and this launch is {launch.engine or 'plain'}"
        raise ConfigError(Problem(name, found, "start with the launch file that the run was started with"))
    if engine == "DEEPSPEED" and world_size != launch.world_size:
        found = (
            f"is split over {world_size} processes and this launch has {launch.world_size}: DeepSpeed reads its "
            "optimizer states back only with the same number"
        )
        raise ConfigError(
            Problem(name, found, f"start {world_size} processes, or train under DDP or FSDP, which resume with any")
        )


def keep_batch(config: RecipeConfig, launch: Launch, record: Record) -> tuple[RecipeConfig, str | None]:
    """Adjust gradient accumulation to keep the global batch size, and so the same rows in every step.

    What is sampled at a time stays as many answers, too.

    Rows are dealt out in turn, one micro-batch to each process: which rows a step takes depends on their number alone,
    as long as that is the same.

    Args:
        config: The run, with the batch as the user writes it.
        launch: How many processes there are now.
        record: Of the checkpoint that the run resumes from.

    Returns:
        The configuration to train with, and what is to be told of it; ``None`` when nothing changed.

    Raises:
        ConfigError: The rows of a step or of a generation cannot be shared evenly, or the batch grows in steps that
            would change.

    Source: ``tests/distributed/test_resumption.py``.
    """
    before = {key: record[key] for key in BATCH_KEYS if key in record}
    # Older ones have no data_size: no tensors were cut then.
    data_size = record.get("data_size") or record.get("world_size") or launch.data_size
    rows = count_rows_per_step(before, data_size)
    # Equal products need no other accumulation, whatever the factors are.
    if rows == count_rows_per_step(config.training, launch.data_size):
        accumulation = config.read("gradient_accumulation_steps")
    else:
        accumulation = _share_rows(config, launch, rows)
    accumulated = read_training(before, "gradient_accumulation_steps")
    if config.schedule.batch_ramp_tokens is not None and accumulation != accumulated:
        found = (
            f"the batch grows by whole micro-batches of all processes, {accumulated} a step so far "
            f"and {accumulation} now"
        )
        remedy = "keep the product of per_device_train_batch_size and the number of processes"
        raise ConfigError(Problem(config.provenance.get("batch_ramp_tokens", "batch_ramp_tokens"), found, remedy))
    planned = {"gradient_accumulation_steps": accumulation}
    if (written := config.training.get(GENERATION_KEY)) is not None:
        micro_batches = record.get(GENERATION_KEY) or written
        answers = read_training(before, "per_device_train_batch_size") * micro_batches * data_size
        planned[GENERATION_KEY] = _share_answers(config, launch, answers)
    changed = [f"{key} is {value}" for key, value in planned.items() if config.read(key) != value]
    if not changed:
        return config, None
    line = (
        f"{launch.data_size} processes instead of {data_size}: {' and '.join(changed)}, so that a step still takes "
        f"{rows} rows"
    )
    return config.with_training(planned), line


def agree_on_checkpoint(
    resume_from: Path | None, launch: Launch, accumulation: int, say: Callable[[str], None]
) -> Path | None:
    """Return the newest checkpoint whose hashes are valid; every process must call.

    All get the same, and each reads its share of the files. What is not whole is put aside by the main process: it
    counts for nothing any more, and is deleted by nobody but the user.

    Args:
        resume_from: A complete checkpoint, ``None`` when there is none; what the main process has found counts.
        launch: The processes, which have met.
        accumulation: Micro-batches a step that this process has planned.
        say: Tells of each checkpoint that is put aside, with the file that is wrong.

    Raises:
        ConfigError: A process cannot see a checkpoint, or has planned another batch than the main one.
    """
    # Each turn puts one damaged checkpoint aside, so that it ends. Every process makes the same two collective calls in
    # a turn, also where it has found a problem: errors are raised when all of them know.
    while True:
        newest = list_checkpoints(resume_from.parent) if launch.is_main and resume_from else []
        chosen = broadcast_object((newest[0][1] if newest else None, accumulation))
        checkpoint = chosen[0]
        problem = _find_disagreement(launch, accumulation, *chosen)
        damage = None
        if checkpoint is not None and problem is None:
            damage = find_damage(checkpoint, launch.rank, launch.world_size)
        found = gather_objects((problem, damage))
        if problems := [problem for problem, _ in found if problem]:
            raise ConfigError(*problems)
        damages = [damage for _, damage in found if damage]
        if checkpoint is None or not damages:
            return checkpoint
        if launch.is_main:
            aside = put_aside(checkpoint, "damaged")
            kept = f"it is kept as {aside.name}, and the one before it is used"
            say(f"{checkpoint.name} is not whole: {damages[0]}; {kept}")


def _find_disagreement(
    launch: Launch, accumulation: int, checkpoint: Path | None, its_accumulation: int
) -> Problem | None:
    """Return why this process disagrees with the main one."""
    name = f"process {launch.rank}"
    if its_accumulation != accumulation:
        found = f"has planned {accumulation} micro-batches a step and the main process {its_accumulation}"
        return Problem(name, found, "run the same command again")
    if checkpoint is not None and not checkpoint.is_dir():
        found = f"does not see {checkpoint}, from which the main process resumes"
        return Problem(name, found, "put output_dir on storage that all machines share")
    return None


def seed_process(seed: int, step: int, rank: int) -> None:
    """Seed a process without stored random states from seed, step and rank."""
    # Hashed: of sums, step 1 on rank 0 would be step 0 on rank 1. numpy takes seeds of 32 bits.
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    set_seed(int.from_bytes(digest[:4], "big"))


def _share_rows(config: RecipeConfig, launch: Launch, rows: int) -> int:
    per_device: int = config.read("per_device_train_batch_size")
    accumulation, rest = divmod(rows, per_device * launch.data_size)
    if not rest:
        return accumulation
    where = config.provenance.get("per_device_train_batch_size", "per_device_train_batch_size")
    found = (
        f"a step of this run takes {rows} rows, which {launch.data_size} processes with {per_device} rows each "
        "cannot share evenly"
    )
    numbers = [number for number in range(1, rows // per_device + 1) if not rows % (per_device * number)]
    choices = [f"start {_list_choices(numbers)} processes"] if numbers else []
    if not rows % launch.data_size:
        share = rows // launch.data_size
        sizes = [size for size in range(1, share + 1) if not share % size]
        choices.append(
            f"write per_device_train_batch_size and gradient_accumulation_steps whose product is {share} "
            f"(the former {_list_choices(sizes)})"
        )
    raise ConfigError(Problem(where, found, ", or ".join(choices)))


def _share_answers(config: RecipeConfig, launch: Launch, answers: int) -> int:
    per_device: int = config.read("per_device_train_batch_size")
    steps, rest = divmod(answers, per_device * launch.data_size)
    if rest:
        found = (
            f"{answers} answers of this run are sampled at a time, which {launch.data_size} processes with "
            f"{per_device} rows each cannot share evenly"
        )
        remedy = "start as many processes as before, or write a smaller per_device_train_batch_size"
        raise ConfigError(Problem(config.provenance.get(GENERATION_KEY, GENERATION_KEY), found, remedy))
    return steps


def _list_choices(numbers: list[int]) -> str:
    *others, last = [str(number) for number in numbers]
    return f"{', '.join(others)} or {last}" if others else last


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
"""Keys of length and schedule: changes are allowed if all past learning rates agree."""


def find_common_checkpoint(
    config: RecipeConfig, before: Mapping[str, Any], differing: Collection[str], world_size: int
) -> Path | None:
    """Return the newest complete checkpoint that the old and the extended run share.

    They would when every step up to it had the same rows and the same learning rate. A ``warmup_stable_decay`` run
    always has one at the start of its decay, so that it can be made longer without warming up again.

    Args:
        config: The run now.
        before: Its keys as they were, from ``run.json``.
        differing: Names of the keys that differ.
        world_size: Data-parallel processes, whose steps take the rows that those of the old run took.

    Returns:
        ``None``: another key differs, the run is none of pretraining, or no such checkpoint is left.

    Source: ``tests/training/checkpoints/test_extension.py``.
    """
    if config.recipe != "pretrain" or not set(differing) <= EXTENDABLE:
        return None
    try:
        now = plan_pretraining(config, world_size)
        then = plan_pretraining(_restore(config, before, differing), world_size)
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
        keys = set(keys) - names  # What is left are upstream's.
    training |= {name: before[name] for name in keys if before.get(name) is not None}
    return dataclasses.replace(config, training=training, **restored)

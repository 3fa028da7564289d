"""Resume: all ranks agree on one checkpoint, the global batch size is kept, pretraining runs can be extended."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import platform
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import set_seed

from recipes_lib.config.schema import RecipeConfig, read_training
from recipes_lib.errors import ConfigError, Problem, list_first, merge_alike
from recipes_lib.planning.schedule import agree_until, count_run_tokens, plan_pretraining
from recipes_lib.quantities import pluralize
from recipes_lib.training.checkpoints import manifest
from recipes_lib.training.collectives import broadcast_object, gather_objects
from recipes_lib.training.layouts.launch_environment import Launch


def count_rows_per_step(training: Mapping[str, Any], world_size: int) -> int:
    """Return the global batch size: rows per optimizer step, over all processes and micro-batches.

    Args:
        training: Upstream's training keys; missing ones take upstream's defaults.
        world_size: Number of data-parallel ranks.
    """
    per_device: int = read_training(training, "per_device_train_batch_size")
    accumulation: int = read_training(training, "gradient_accumulation_steps")
    return per_device * accumulation * world_size


def list_kept_batch_keys(previous: Mapping[str, Any], now: Mapping[str, Any], data_size: int) -> set[str]:
    """Return the keys of the batch, if these only divide the same rows and answers over other ranks and micro-batches.

    Args:
        previous: Content of ``run.json``.
        now: Present configuration keys.
        data_size: Present number of data-parallel ranks.
    """

    def compute_ratio(keys: Mapping[str, Any]) -> float:
        """Return the number of answers that are sampled together, divided by the rows of a step."""
        accumulation: int = read_training(keys, "gradient_accumulation_steps")
        return (keys.get(manifest.GENERATION_KEY) or accumulation) / accumulation

    if count_rows_per_step(now, data_size) != previous.get("rows_per_step"):
        return set()
    is_same = compute_ratio(now) == compute_ratio(previous.get("config", {}))
    return {*manifest.BATCH_KEYS, manifest.GENERATION_KEY} if is_same else set(manifest.BATCH_KEYS)


def list_fingerprints(data: Any) -> list[Any]:
    """Return the fingerprints in a ``data`` or ``weights`` record; empty if it has none, as in older versions."""
    match data:
        case {"sources": [*parts]}:  # Token sets of pretraining.
            return [part["fingerprint"] for part in parts if isinstance(part, dict) and "fingerprint" in part]
        case {"inputs": {"sources": {**digests}}}:  # Packed chats and pairs.
            return list(digests.values())
        case {"fingerprint": digest}:  # Prompts, and weights.
            return [digest]
    return []


def verify_checkpoint_fits(record: manifest.Record, name: str, launch: Launch) -> None:
    """Raise if this launch cannot load a checkpoint.

    Checkpoints of FSDP2, DDP and one process load under each other at any world size; DeepSpeed's do not.

    Args:
        record: Manifest of the checkpoint.
        name: Name of the checkpoint folder.
        launch: Present launch.

    Raises:
        ConfigError: One of checkpoint and launch is DeepSpeed's and the other is not, or both are but their world sizes
            differ, or one is of ZeRO-3.
    """
    engine, world_size = record.get("engine", ""), record.get("world_size", launch.world_size)
    # Only ZeRO-3 splits the weights over files of the ranks.
    is_split = any(re.search(r"zero_pp_rank_\d+_.*model_states", file) for file in record.get("files", ()))
    if engine != launch.engine and "DEEPSPEED" in (engine, launch.engine):
        found = f"was written under {engine or 'no sharding engine'} and this launch is {launch.engine or 'plain'}"
    elif engine == "DEEPSPEED" and world_size != launch.world_size:
        found = (
            f"is split over {world_size} processes and this launch has {launch.world_size}: DeepSpeed reads its "
            "optimizer states back only with the same number"
        )
    elif engine == "DEEPSPEED" and is_split != (launch.layout.zero_stage == 3):
        stage = launch.layout.zero_stage
        found = f"was written under {'ZeRO-3' if is_split else 'ZeRO-1 or 2'}, and this launch is ZeRO-{stage}"
    else:
        return
    remedy = "start with the launch file and the number of processes that the run was started with"
    other = f"start a new run from its weights, which `recipes export .../{name} FOLDER` writes"
    raise ConfigError(Problem(name, found, f"{remedy}, or {other}"))


def keep_batch(
    config: RecipeConfig, launch: Launch, record: manifest.Record, say: Callable[[str], None]
) -> RecipeConfig:
    """Adjust gradient accumulation so that every step takes the same rows at another world size.

    Micro-batches are assigned to ranks in turn, so the rows of step n depend on the global batch size only. The number
    of answers per generation is kept in the same way.

    Args:
        config: Run configuration as the user wrote it.
        launch: Present launch.
        record: Manifest of the checkpoint to resume from.
        say: Logger for a line about changed keys.

    Returns:
        The configuration to train with.

    Raises:
        ConfigError: The rows of a step or of a generation are not divisible by the new number of ranks, or gradient
            accumulation would change with ``batch_ramp_tokens`` or ``dataloader_drop_last``.

    Source: ``tests/distributed/test_resumption.py``.
    """
    before = {key: record[key] for key in manifest.BATCH_KEYS if key in record}
    data_size = record.get("data_size") or record.get("world_size") or launch.data_size
    rows = count_rows_per_step(before, data_size)
    taken = {"gradient_accumulation_steps": rows}
    if (written := config.training.get(manifest.GENERATION_KEY)) is not None:
        per_device: int = read_training(before, "per_device_train_batch_size")
        taken[manifest.GENERATION_KEY] = per_device * (record.get(manifest.GENERATION_KEY) or written) * data_size
    planned = _share_evenly(config, launch, taken)
    accumulation = planned["gradient_accumulation_steps"]
    accumulated = read_training(before, "gradient_accumulation_steps")
    # With these keys, another number of micro-batches changes the rows of past and future steps.
    batch_ramp_tokens, drop_last = config.schedule.batch_ramp_tokens, config.training.get("dataloader_drop_last")
    key = "batch_ramp_tokens" if batch_ramp_tokens else "dataloader_drop_last" if drop_last else None
    if key and accumulation != accumulated:
        found = f"{key} counts whole micro-batches, {accumulated} per step at the checkpoint and {accumulation} now"
        remedy = "keep the product of per_device_train_batch_size and the number of processes"
        raise ConfigError(Problem(config.locate(key), found, remedy))
    if changed := [f"{key} is {value}" for key, value in planned.items() if config.read(key) != value]:
        say(
            f"{pluralize(launch.data_size, 'process')} instead of {data_size}: {' and '.join(changed)}, so that a step "
            f"still takes {pluralize(rows, 'row')}"
        )
        config = config.with_training(planned)
    return config


def verify_shared(output_dir: Path, launch: Launch, say: Callable[[str], None]) -> None:
    """Verify that all machines see the main process's files; every process must call, before checkpoints are written.

    Args:
        output_dir: Output directory of the run.
        launch: Launch of this process, with its process group initialised.
        say: Logger for a line, if one does not and the main process writes checkpoints alone.

    Raises:
        ConfigError: A machine does not see them, and every process writes its shards.
    """
    probe = output_dir / "_visible"
    if launch.is_main:
        probe.touch()
    broadcast_object(None)  # The main process has created the file.
    names = ", ".join(sorted({*filter(None, gather_objects(None if probe.is_file() else platform.node()))}))
    if launch.is_main:
        probe.unlink()
    found, remedy = f"{names} does not see checkpoints", "put output_dir on storage that all machines share"
    if names and (launch.engine or launch.part):
        raise ConfigError(Problem("output_dir", found, remedy))
    if names:
        say(f"no resume: {found}; {remedy}")


def agree_on_checkpoint(
    resume_from: Path | None, launch: Launch, plan: Mapping[str, Any], say: Callable[[str], None]
) -> Path | None:
    """Return the newest checkpoint whose hashes are valid, the same on all ranks; every process must call.

    Each rank hashes its share of the files. The main process renames a damaged checkpoint to
    ``damaged-checkpoint-N``: it is never resumed from, and only the user deletes it.

    Args:
        resume_from: Newest complete checkpoint, ``None`` if there is none; only the main process's value is used.
        launch: Launch of this process, with its process group initialised.
        plan: Values by name that must be the same on all ranks: configuration keys and versions of packages.
        say: Logger for one line per damaged checkpoint.

    Raises:
        ConfigError: A process does not see the main process's checkpoint or cannot read a file of it, or its plan
            differs from that of the main process.
    """
    # Ends, because each iteration renames one damaged checkpoint. Every rank makes the same two collective calls per
    # iteration, even after it has found a problem: errors are raised once all ranks know them.
    while True:
        newest = manifest.list_checkpoints(resume_from.parent) if launch.is_main and resume_from else []
        own = newest[0][1] if newest else None
        checkpoint, main_plan, main_view = broadcast_object((own, plan, own and _see(own)))
        problem = _find_disagreement(launch, plan, checkpoint, main_plan, main_view)
        damage = None
        if checkpoint is not None and problem is None:
            damage = manifest.find_damage(checkpoint, launch.rank, launch.world_size)
            problem = manifest.find_unreadable(checkpoint) if damage else None
        found = gather_objects((problem, damage))
        if problems := [problem for problem, _ in found if problem]:
            raise ConfigError(*merge_alike(problems))
        damages = [damage for _, damage in found if damage]
        if checkpoint is None or not damages:
            return checkpoint
        if launch.is_main:
            aside = manifest.put_aside(checkpoint, "damaged")
            say(f"{checkpoint.name} is damaged: {damages[0]}; it is kept as {aside.name}")


def _see(checkpoint: Path) -> object:
    """Return the manifest of a checkpoint, or why this process finds it incomplete."""
    return manifest.find_wrong_size(checkpoint) or manifest.read_complete(checkpoint)


def _find_disagreement(
    launch: Launch, plan: Mapping[str, Any], checkpoint: Path | None, main_plan: Mapping[str, Any], main_view: object
) -> Problem | None:
    """Return how this process's plan or file system differs from the main process's; ``None`` if they agree."""
    name, host = f"process {launch.rank}", platform.node()
    # On a disk of its own, a machine may have a checkpoint of another run, or a part of a copy. First, because the plan
    # depends on the checkpoint that a process sees.
    if checkpoint is not None and _see(checkpoint) != main_view:
        found = f"on {host} does not see {checkpoint} with the files from which the main process resumes"
        remedy = "put output_dir on storage that all machines share, or copy this folder there"
        return manifest.find_unreadable(checkpoint) or Problem(name, found, remedy)
    # Gradients are averaged, but every rank updates its own weights: with another learning rate they would diverge.
    differing = [
        f"{key} is {plan.get(key)!r} and {main_plan.get(key)!r} on the main process"
        for key in sorted(plan.keys() | main_plan.keys())
        if plan.get(key) != main_plan.get(key)
    ]
    if differing:
        remedy = "start every machine with the same command, files and packages"
        return Problem(name, f"on {host}: {list_first(differing)}", remedy)
    if checkpoint is not None and not checkpoint.is_dir():  # As a link to a disk that is not mounted.
        return Problem(str(checkpoint), "is neither a folder nor a link to one", "restore it, or delete it")
    return None


def seed_process(seed: int, step: int, rank: int) -> None:
    """Seed a process without stored random states from seed, step and rank."""
    # A hash, because of sums step 1 on rank 0 would equal step 0 on rank 1. 4 bytes, because numpy's seeds are 32 bits.
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    set_seed(int.from_bytes(digest[:4], "big"))


def _share_evenly(config: RecipeConfig, launch: Launch, taken: Mapping[str, int]) -> dict[str, int]:
    """Return the micro-batches that each process computes, by the key that counts them.

    Args:
        config: The run.
        launch: Present launch.
        taken: Rows of a step by ``gradient_accumulation_steps``, and answers of a generation by ``GENERATION_KEY``.

    Raises:
        ConfigError: One of them is not divisible by the rows of a micro-batch on all data-parallel ranks.
    """
    per_device: int = config.read("per_device_train_batch_size")
    rows, *answers = taken.values()
    common = math.gcd(rows, *answers)
    if not common % (per_device * launch.data_size):
        return {key: number // (per_device * launch.data_size) for key, number in taken.items()}
    where = config.locate("per_device_train_batch_size")
    sampled = f" and samples {answers[0]} answers at a time" if answers else ""
    found = (
        f"a step of this run takes {rows} rows{sampled}, which {launch.data_size} processes with {per_device} rows "
        "each cannot share evenly"
    )
    choices = [] if common % per_device else [f"start {_list_divisors(common // per_device)} processes"]
    if not common % launch.data_size:
        choices.append(
            "write per_device_train_batch_size and gradient_accumulation_steps whose product is "
            f"{rows // launch.data_size} (the former {_list_divisors(common // launch.data_size)})"
        )
    raise ConfigError(Problem(where, found, ", or ".join(choices)))


def _list_divisors(number: int) -> str:
    *others, last = [str(divisor) for divisor in range(1, number + 1) if not number % divisor]
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
"""Keys of run length and schedule, which may change if all past learning rates stay the same."""


def find_common_checkpoint(
    config: RecipeConfig, before: Mapping[str, Any], differing: Collection[str], world_size: int
) -> Path | None:
    """Return the newest complete checkpoint that the old and the extended run have in common.

    That is one up to which every step has the same rows and the same learning rate. A ``warmup_stable_decay`` run keeps
    a checkpoint at the start of its decay, so that it can be extended without another warmup.

    Args:
        config: Present configuration.
        before: Configuration keys of the old run, from ``run.json``.
        differing: Names of the keys that differ.
        world_size: Number of data-parallel ranks, with the old run's global batch size.

    Returns:
        The checkpoint; ``None`` if a key outside ``EXTENDABLE`` differs, the recipe is not ``pretrain``, a length is in
        epochs, the data are a stream, whose rows are permuted over the part that a run of this length reads, or no such
        checkpoint exists.

    Raises:
        ConfigError: As ``plan_pretraining``.

    Source: ``tests/training/checkpoints/test_extension.py``.
    """
    if config.recipe != "pretrain" or config.data.dataset_streaming or not set(differing) <= EXTENDABLE:
        return None
    runs = (config, _restore(config, before, differing))
    if any(count_run_tokens(run, world_size) is None for run in runs):  # A length in epochs needs the data.
        return None
    now, then = (plan_pretraining(run, world_size) for run in runs)
    checkpoints = manifest.list_checkpoints(Path(config.training["output_dir"]))
    # The rows of a step do not depend on the length of the run. ``step + 1``: the optimizer of a checkpoint already has
    # the learning rate of the next step.
    common = (
        path
        for step, path in checkpoints
        if step < now.num_steps and manifest.is_complete(path) and agree_until(now.schedule, then.schedule, step + 1)
    )
    return next(common, None)


def _restore(config: RecipeConfig, before: Mapping[str, Any], keys: Collection[str]) -> RecipeConfig:
    """Return the configuration with the old values of some keys."""
    training = {name: value for name, value in config.training.items() if name not in keys}
    restored: dict[str, Any] = {}
    for section in ("pretraining", "schedule"):
        current = getattr(config, section)
        names = {field.name for field in dataclasses.fields(current)} & set(keys)
        restored[section] = dataclasses.replace(current, **{name: before[name] for name in names})
        keys = set(keys) - names  # The remaining keys are upstream's.
    training |= {name: before[name] for name in keys if before.get(name) is not None}
    return dataclasses.replace(config, training=training, **restored)

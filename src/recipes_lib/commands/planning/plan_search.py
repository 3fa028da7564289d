"""``recipes plan --gpus 8xH100``: search for the fastest parallel layout of a run on these GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from transformers import PreTrainedConfig

from recipes_lib.commands.planning.planned_hardware import UNLABELLED, Hardware, Row
from recipes_lib.config.loader import drop_flags, load_config
from recipes_lib.config.paths import find_launch_file
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import explain_write_errors, replace_text
from recipes_lib.models.quantization import check_quantization
from recipes_lib.planning.activations import list_keys
from recipes_lib.planning.compute import RL_RECIPES
from recipes_lib.planning.devices import Device
from recipes_lib.planning.memory import plan_memory, resolve_checkpointing
from recipes_lib.planning.memory_plan import MARGIN, Layout, MemoryPlan
from recipes_lib.planning.schedule import compute_steps, plan_pretraining
from recipes_lib.planning.search import Candidate, search
from recipes_lib.planning.timing import GPUS_OF_A_MACHINE, Iteration, estimate_iteration
from recipes_lib.quantities import format_figure, pluralize
from recipes_lib.report.overview import format_rows
from recipes_lib.rl.rollout_schedule import RolloutSchedule, compute_group_schedule, compute_schedule
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import (
    SCHEDULES,
    Launch,
    name_pipeline,
    name_variables,
    read_launch,
    read_launch_file,
)
from recipes_lib.training.layouts.memory_layout import build_layout, verify_model

REPLICATED_OR_SHARDED: Final = ("single_gpu", "ddp", "fsdp2")
"""Launch files that are planned if none is named: that of one GPU, or those of several."""
_HEADS: Final = ("layout", "rows", "recomputed", "compiled", "GB", "s/step", "verdict")
"""Columns of the table; ``rows``: micro-batch size x gradient accumulation of a data-parallel process."""
_MANY_PROMPTS: Final = 1_000_000_000
"""Placeholder for the number of prompts: planning reads no data, and the size of an iteration does not depend on it."""


class PlannedRun(NamedTuple):
    """A run to plan.

    Attributes:
        config: Configuration of the run.
        model_config: Configuration of the trained model.
        options: Flags of the command.
        flags: Recipe and keys of the run, as flags.
    """

    config: RecipeConfig
    model_config: PreTrainedConfig
    options: argparse.Namespace
    flags: Sequence[str] = ()


class PlannedLaunch(NamedTuple):
    """Launch of a layout.

    Attributes:
        name: Name in the table.
        document: Contents of the launch file of accelerate.
        launch: Launch as its processes read it.
    """

    name: str
    document: Mapping[str, Any]
    launch: Launch


def search_plan(run: PlannedRun, hardware: Hardware, num_processes: int) -> Iterator[Row]:
    """Yield the results of ``planning.search``, the best first, with hours, cost and the keys to set.

    Args:
        run: The run.
        hardware: GPUs to plan for.
        num_processes: Number of processes that the batch keys of the recipe are written for.

    Raises:
        ConfigError: The run fits in no layout, with the smallest change that would fit; the batch does not divide among
            the GPUs; or as ``verify_limits``.
    """
    config, device, number = run.config, hardware.device, hardware.num_gpus
    # The global batch size, which the search keeps.
    batch = config.read("per_device_train_batch_size") * config.read("gradient_accumulation_steps") * num_processes
    # Before the search, which takes longer than finding an invalid schedule.
    steps = _count_steps(run, num_processes)
    launches, refused = list_launches(config, run.model_config, number, run.options.hardware)

    find_problems = cache(partial(_find_key_problems, run))

    def supports(layout: Layout, keys: Mapping[str, Any]) -> bool:
        for problem in find_problems(keys["gradient_accumulation_steps"] == 1, keys["torch_compile"]):
            refused.setdefault(launches[layout].name, problem)
            return False
        return is_supported(config.with_training(keys), launches[layout], refused)

    found = search(config, run.model_config, list(launches), batch, device, hardware.measured, supports)
    if not found:
        problem = f"{batch} rows of an optimizer step cannot be divided among {number} processes"
        undivided = [Problem("--gpus", problem, "name a number that divides them")] if batch % number else []
        raise ConfigError(*undivided, *refused.values())
    best = found[0]
    if not best.fits:
        least = min(one.memory.peak for one in found) / 1e9
        # The batch of a recipe for as many processes as GPUs grows with them.
        raise ConfigError(describe_misfit(run, hardware, least, batch if num_processes != number else 0))
    hours = best.seconds * steps / 3600
    verify_limits(run.options, hours, hardware)
    if run.options.write:
        write_plan(run.options.write, run.flags, best.keys, best.layout, launches[best.layout])
    yield from hardware.adapt_to(config.with_training(best.keys)).describe()
    yield "batch", f"{batch:,} rows an optimizer step, the recipe's for {num_processes:,} processes (--num_processes)"
    candidates = [_describe(launches[one.layout].name, one, best) for one in _thin(found)]
    yield from ((UNLABELLED, line) for line in ("", *format_rows([_HEADS, *candidates]), ""))
    searched = {launches[one.layout].name for one in found}
    yield from _describe_refused({name: why for name, why in refused.items() if name not in searched})
    if best.memory.about:
        yield "memory", best.memory.about
    yield "keys", _join_keys(best.keys)
    yield "launch", compose_flags(launches[best.layout], best.layout)
    # A share of 0 on the GPU: FSDP2 with offloading to the host.
    if not best.layout.shards.weights:
        other = next((one for one in found if one.fits and one.layout.shards.weights), None)
        text = other and f"{launches[other.layout].name}, {other.seconds:.3g} s a step"
        yield from _describe_offload(best, text or _find_change(run, hardware, batch))
    if not steps:
        yield "time", f"{best.seconds:.3g} s a step; for hours, write --num_rows, the packed rows of the training set"
        return
    yield "time", f"{format_figure(hours)} hours for {pluralize(steps, 'step')}"
    yield from hardware.describe_bill(hours)


def search_rollouts(run: PlannedRun, hardware: Hardware) -> tuple[RecipeConfig, MemoryPlan, list[Row]]:
    """Return the fastest configuration with its memory plan, and rows about all layouts, changed keys and the launch.

    Each layout has the largest batches that fit, with the recipe's number of answers per iteration.

    Raises:
        ConfigError: The run fits in no layout, with the smallest change that would fit; no layout supports the recipe;
            or as ``verify_limits``.
    """
    config, model_config, device = run.config, run.model_config, hardware.device
    launches, refused = list_launches(config, model_config, hardware.num_gpus, run.options.hardware)
    found, verdicts, num_iterations = list[Candidate](), list[str](), 0
    for layout, planned in launches.items():
        if not is_supported(config, planned, refused):
            continue
        for keys in _list_batches(config):
            sized = config.with_training(keys)
            plan = plan_memory(sized, model_config, layout, device_bytes=device.memory)
            if fits := plan.fits(device.memory):
                break
        settled = resolve_checkpointing(sized, plan)
        one, schedule = plan_iteration(settled, model_config, layout, device, hardware.adapt_to(settled).mfu)
        # Equal in every layout, since the batch is per GPU; unknown without `max_steps`.
        num_iterations = schedule.num_iterations if config.read("max_steps") > 0 else 0
        # Rounded as printed, so that layouts that print equal times count as equal.
        seconds = float(f"{one.seconds:.3g}")
        keys = {**keys, **(list_keys(plan.checkpointing) if plan.choices else {})}
        found.append(Candidate(layout, keys, plan, fits, {"iteration": seconds}))
        verdicts.append(f"{planned.name} {plan.peak / 1e9:.1f} GB, {f'{seconds:g} s' if fits else 'does not fit'}")
    if not found:
        raise ConfigError(*refused.values())
    # `min` takes the first of equals, which shards least.
    best = min(found, key=lambda one: (not one.fits, one.seconds))
    if not best.fits:
        least = min((one.memory for one in found), key=attrgetter("peak"))
        if least.peak > device.memory:
            raise ConfigError(describe_misfit(run, hardware, least.peak / 1e9))
        raise ConfigError(describe_engine("--gpus", least, run.options.gpus))
    planned = launches[best.layout]
    billed = hardware._replace(num_gpus=count_gpus(config, hardware.num_gpus))
    verify_limits(run.options, best.seconds * num_iterations / 3600, billed)
    if run.options.write:
        write_plan(run.options.write, run.flags, best.keys, best.layout, planned)
    rows = [("keys", _join_keys(best.keys))] if best.keys else []
    rows = [("layouts", "; ".join(verdicts)), *rows, ("launch", compose_flags(planned, best.layout))]
    return config.with_training(best.keys), best.memory, rows


def describe_engine(flag: str, plan: MemoryPlan, gpu: str) -> Problem:
    """Return the problem of a plan that fits the GPU, but whose colocated engine does not fit its share."""
    found = f"vLLM's weights and one answer do not fit its {plan.engine_share:.0%} of {gpu}"
    return Problem(flag, found, "raise `vllm_gpu_memory_utilization`, or name GPUs with more memory")


def count_gpus(config: RecipeConfig, num_gpus: int) -> int:
    """Return the GPUs of a run, with those of a vLLM server, which are assumed to be as many as those of training."""
    is_server = config.engine.use_vllm and config.engine.vllm_mode == "server"
    return 2 * num_gpus if is_server else num_gpus


def plan_iteration(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, device: Device, mfu: float
) -> tuple[Iteration, RolloutSchedule]:
    """Return the estimate of an iteration of reinforcement learning, and the schedule of the run.

    Args:
        config: Configuration of the run; without ``max_steps``, ``num_iterations`` of the schedule is meaningless.
        model_config: Configuration of the policy.
        layout: Parallel layout of the processes.
        device: GPU of each process.
        mfu: Model FLOPs utilisation, as for ``estimate_iteration``.

    Raises:
        ConfigError: The answers of an iteration do not divide into batches.
    """
    plan_answers = compute_schedule if config.recipe == "ppo" else compute_group_schedule
    schedule = plan_answers(_MANY_PROMPTS, config, layout.num_processes)
    answers, passes = schedule.answers_per_iteration, schedule.update_epochs
    return estimate_iteration(config, model_config, answers, passes, layout, device, mfu), schedule


def _find_key_problems(run: PlannedRun, is_single: bool, compiles: bool) -> Sequence[Problem]:
    """Return the problems of a configuration with one micro-batch per step or several, and compiled or not."""
    keys = {"gradient_accumulation_steps": 1 if is_single else 2, "torch_compile": compiles}
    try:
        load_config(run.config.recipe, [*drop_flags(run.flags[2:], keys), *shlex.split(_join_keys(keys))])
    except ConfigError as error:
        return error.problems
    return ()


def _describe_offload(best: Candidate, other: str) -> Iterator[Row]:
    """Yield the host memory of a plan that offloads to it, and what would fit without offload."""
    size = best.memory.host_bytes * min(GPUS_OF_A_MACHINE, best.layout.num_gpus)
    yield "host memory", f"{size / 1e9:,.1f} GB for each machine, for weights, gradients and optimizer states"
    yield "without it", other


def list_launches(
    config: RecipeConfig, model_config: PreTrainedConfig, number: int, only: str | None = None
) -> tuple[dict[Layout, PlannedLaunch], dict[str, Problem]]:
    """Return the launch of each layout of ``number`` GPUs, and by name the problem of each unsupported layout.

    Raises:
        ConfigError: No layout has the launch file ``only``.
    """
    launches, refused = dict[Layout, PlannedLaunch](), dict[str, Problem]()
    meshes, wanted = list(_list_meshes(number)), only and find_launch_file(only)
    known = ", ".join(dict.fromkeys(name for name, _, _ in meshes))
    meshes = [mesh for mesh in meshes if wanted in (None, find_launch_file(mesh[0]))]
    if not meshes:
        found = f"{only} is not among the layouts of {pluralize(number, 'GPU')} that are searched"
        raise ConfigError(Problem("--hardware", found, f"write one of {known}, or --gpu and --num_gpus for this file"))
    documents = {file: read_launch_file(find_launch_file(file)) for file in dict.fromkeys(mesh[0] for mesh in meshes)}
    for file, sizes, stages in meshes:
        parts = [f"{name} {size}" for name, size in sizes.items() if name in ("tp", "cp", "sp")]
        name = " ".join([file, *parts, *([f"stages {stages}"] if stages > 1 else [])])
        document = documents[file] | {"num_processes": number, "num_machines": math.ceil(number / GPUS_OF_A_MACHINE)}
        if config.training.get("fp16"):
            document["mixed_precision"] = "fp16"  # Shipped launch files have bf16, which GPUs before Ampere lack.
        if mesh := document.get("parallelism_config"):
            document["parallelism_config"] = {
                key: sizes.get(key.removeprefix("parallelism_config_").removesuffix("_size"), 1) for key in mesh
            }
        launch = read_launch({**name_variables(document), **name_pipeline(stages, SCHEDULES[0])})
        try:
            verify_model(model_config, launch)
        except ConfigError as error:
            refused[name] = error.problems[0]
        else:
            # Pipeline parallelism needs at least as many micro-batches as stages.
            launches[build_layout(launch, file, stages)] = PlannedLaunch(name, document, launch)
    return launches, refused


def is_supported(config: RecipeConfig, planned: PlannedLaunch, refused: dict[str, Problem]) -> bool:
    """Return whether a layout supports a run; if not, its problem is added to ``refused`` by its name."""
    try:
        verify_combination(config, planned.launch, planned.name)
    except ConfigError as error:
        refused.setdefault(planned.name, error.problems[0])
        return False
    return True


def _list_meshes(number: int) -> Iterator[tuple[str, dict[str, int], int]]:
    """Yield launch file, sizes of the mesh, and pipeline stages of the layouts of ``number`` GPUs, in powers of two."""
    if number == 1:
        yield "single_gpu", {}, 1
        return
    yield from ((file, {}, 1) for file in ("ddp", "fsdp2", "zero2", "fsdp2_offload"))
    if number > GPUS_OF_A_MACHINE and not number % GPUS_OF_A_MACHINE:
        yield "hsdp", {"dp_replicate": number // GPUS_OF_A_MACHINE, "dp_shard": GPUS_OF_A_MACHINE}, 1
    for size in (2**power for power in range(1, number.bit_length()) if not number % 2**power):
        for file, name in (("fsdp2_tp", "tp"), ("fsdp2_cp", "cp"), ("zero3_sp", "sp")):
            # Tensor and Ulysses parallelism communicate in every layer, without overlap, so only within a machine;
            # context parallelism exchanges keys and values alone, also between machines.
            if size <= GPUS_OF_A_MACHINE or name == "cp":
                yield file, {"dp_shard": number // size, name: size}, 1
        yield from ((file, {}, size) for file in ("ddp", "fsdp2"))


def _describe_refused(refused: Mapping[str, Problem]) -> Iterator[Row]:
    """Yield a row per reason, with the layouts that it concerns."""
    groups: dict[str, list[str]] = {}
    for name, why in refused.items():
        groups.setdefault(why.found, []).append(name)
    yield from (("not possible", f"{', '.join(names)}: {found}") for found, names in groups.items())


def _count_steps(run: PlannedRun, num_processes: int) -> int:
    """Return the full optimizer steps of the run, which do not depend on the layout; 0 if unknown."""
    if run.config.recipe == "pretrain":
        plan = plan_pretraining(run.config, num_processes)
        return round(plan.num_rows / plan.rows_per_step)
    return compute_steps(run.options.num_rows, run.config.training, num_processes).num_steps


def verify_limits(options: argparse.Namespace, hours: float, hardware: Hardware) -> None:
    """Raise if a run exceeds ``--deadline`` or ``--budget``.

    Args:
        options: Flags of the command.
        hours: Hours of the best plan that fits; 0 if the length of the run is unknown.
        hardware: GPUs and their price.

    Raises:
        ConfigError: The run takes longer or costs more than allowed, or a limited figure is unknown.
    """
    cost = hardware.price and hours * hardware.num_gpus * hardware.price
    figures = (
        ("deadline", options.deadline, hours, "takes {:,.3g} hours"),
        ("budget", options.budget, cost, "costs {:,.2f}"),
    )
    for flag, limit, value, words in figures:
        if limit is None:
            continue
        if not hours or value is None:
            found = "needs the length of the run" if not hours else "needs a price"
            remedy = "write `max_steps`, `max_tokens` or --num_rows" if not hours else "write --price_per_gpu_hour"
            raise ConfigError(Problem(f"--{flag}", found, remedy))
        if value > limit:
            found = f"the best plan that fits {words.format(value)}, more than {limit:,.3g}"
            more = ", or name more GPUs" if flag == "deadline" else ""
            remedy = f"raise it, or shorten the run{more}"
            raise ConfigError(Problem(f"--{flag}", found, remedy))


def _thin(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each layout; for the best layout, one per mode of activation checkpointing."""
    kinds: dict[tuple[Layout, str], Candidate] = {}
    for one in found:
        kinds.setdefault((one.layout, one.memory.checkpointing if one.layout == found[0].layout else ""), one)
    return list(kinds.values())


def _describe(name: str, one: Candidate, best: Candidate) -> tuple[str, ...]:
    """Return the table cells of a candidate; its verdict names the cost that differs most from that of the best one."""
    rows = f"{one.keys['per_device_train_batch_size']} x {one.keys['gradient_accumulation_steps']}"
    verdict = "as fast"
    if abs(gap := one.seconds - best.seconds) >= 0.005 * best.seconds:
        most = max(one.costs, key=lambda what: (one.costs[what] - best.costs[what]) * gap)
        verdict = f"{one.costs[most] - best.costs[most]:+.2g} s {most}"
    if one is best:
        verdict = "fastest that fits" if one.is_tight else f"fastest with {MARGIN:.0%} free"
    verdict += f", less than {MARGIN:.0%} free" if one.is_tight else ""
    if not one.fits:
        verdict = "does not fit"
    compiled = "yes" if one.keys["torch_compile"] else "no"
    return name, rows, one.memory.checkpointing, compiled, f"{one.memory.peak / 1e9:.1f}", f"{one.seconds:.3g}", verdict


def describe_misfit(run: PlannedRun, hardware: Hardware, least: float, batch: int = 0) -> Problem:
    """Return the problem of a run that fits in no layout; its remedy is the smallest change that would fit.

    Args:
        run: The run.
        hardware: The GPUs.
        least: Smallest peak memory of all layouts, in GB.
        batch: Rows of an optimizer step, which more GPUs must divide; 0 if their number is per GPU.
    """
    device, gpus = hardware.device, f"{hardware.num_gpus}x{hardware.device.name}"
    layout = f"layout of {run.options.hardware}" if run.options.hardware else "layout"
    found = f"the run fits {gpus} in no {layout}: {least:.1f} GB at least, of {device.memory / 1e9:g} GB"
    return Problem("--gpus", found, _find_change(run, hardware, batch))


class _Change(NamedTuple):
    """Change of a run.

    Attributes:
        words: The change, for the reader.
        apply: Returns the changed configuration.
        factor: Factor of the number of GPUs.
    """

    words: str
    apply: Callable[[RecipeConfig], RecipeConfig] = lambda config: config
    factor: int = 1


def _find_change(run: PlannedRun, hardware: Hardware, batch: int) -> str:
    """Return the smallest change with which the run would fit, replicated or sharded: a single one, else several.

    Args:
        run: The run.
        hardware: The GPUs.
        batch: Rows of an optimizer step, which the GPUs must divide; 0 for any number of GPUs.
    """
    if run.options.hardware:
        return "remove --hardware, to search the other layouts"
    size, config = hardware.device.memory, run.config
    # The search has tried every micro-batch, and recomputation.
    smallest: Mapping[str, Any] = {**list_keys("every layer"), "per_device_train_batch_size": 1}
    smallest = list(_list_batches(config))[-1] if config.recipe in RL_RECIPES else smallest
    config = config.with_training(smallest)
    axes = [changes for changes in _list_axes(config, run.model_config, hardware.num_gpus, batch) if changes]

    # Of the changes, layouts depend on the number of GPUs alone.
    find_launches = cache(lambda count: list_launches(config, run.model_config, count)[0])

    def list_plans(chosen: Sequence[_Change]) -> Iterator[MemoryPlan]:
        changed, count = config, hardware.num_gpus
        for change in chosen:
            changed, count = change.apply(changed), count * change.factor
        # Sharded first, because that fits more often.
        for layout, planned in reversed(find_launches(count).items()):
            if planned.name in REPLICATED_OR_SHARDED and is_supported(changed, planned, {}):
                yield plan_memory(changed, run.model_config, layout, device_bytes=size)

    def fits(chosen: Sequence[_Change]) -> bool:
        return any(plan.fits(size) for plan in list_plans(chosen))

    # Those with the fewest changes first; of as many, those with the fewest GPUs, the last kind.
    choices = product(*([None, *axis] for axis in reversed(axes)))
    combinations = sorted(([*filter(None, reversed(chosen))] for chosen in choices), key=len)
    enough = next(filter(fits, combinations[1:]), None)
    words = " and ".join(change.words for change in enough or combinations[-1])
    if enough:
        return f"{words} would fit"
    least = min((plan.peak for plan in list_plans(combinations[-1])), default=0) / 1e9
    return "name GPUs with more memory" + (f": {words} would need {least:.1f} GB" if least else "")


def _list_axes(
    config: RecipeConfig, model_config: PreTrainedConfig, number: int, batch: int
) -> Iterator[list[_Change]]:
    """Yield the changes of each kind, the smallest first: row length, adapter, optimizer, and GPUs."""
    length = config.tokens.max_length or 0
    shortest = config.rewards.response_length if config.recipe in RL_RECIPES else 0
    parts = [part for part in (length // 2, length // 4) if part > shortest]
    yield [_Change(f"max_length: {part}", partial(_shorten, length=part)) for part in parts]
    if config.recipe in ("sft", "lora", "dpo", "reward", *RL_RECIPES):
        yield list(_list_adapters(config, model_config))
    optim = "adamw_torch_fused"
    if config.read("optim") not in ("adamw_torch", optim):
        # FSDP2 does not support most others.
        yield [_Change(f"optim: {optim}", lambda given: given.with_training({"optim": optim}))]
    factors = [factor for factor in (2, 4, 8, 16) if not batch % (number * factor)]
    yield [_Change(f"{number * factor} of these GPUs", factor=factor) for factor in factors]


def _shorten(config: RecipeConfig, length: int) -> RecipeConfig:
    return dataclasses.replace(config, tokens=dataclasses.replace(config.tokens, max_length=length))


def _list_batches(config: RecipeConfig) -> Iterator[dict[str, Any]]:
    """Yield no keys, those of recomputation, and of smaller batches with equally many answers per iteration."""
    yield {}
    names = ("per_device_eval_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    sampled, rows, steps = map(config.read, names)
    for factor in (1, 2, 4, 8, 16):
        keys = {"activation_checkpointing": config.read("activation_checkpointing") or True}
        keys |= {names[0]: max(sampled // factor, 1)}
        # Otherwise, the micro-batch determines the answers of an iteration.
        if not rows % factor and not config.training.get("steps_per_generation"):
            keys |= {names[1]: rows // factor, names[2]: steps * factor}
        if changed := {key: value for key, value in keys.items() if value != config.read(key)}:
            yield changed


def _list_adapters(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterator[_Change]:
    """Yield an adapter on 16- and on 4-bit weights, if the run has more bits."""
    recipe, how, keys = config.recipe, "an adapter", ["`use_peft: true`"]
    if recipe == "sft":
        recipe, how, keys = "lora", "the `lora` recipe", []
    elif config.adapter.use_peft:
        how, keys = "the adapter", []
    if config.model.dtype != "bfloat16":
        keys.append("`dtype: bfloat16`")
    adapter = dataclasses.replace(config.adapter, use_peft=True)
    model = dataclasses.replace(config.model, dtype="bfloat16")
    for bits in (16, 4):
        quantized = dataclasses.replace(config.quantization, load_in_4bit=bits == 4, load_in_8bit=False)
        changes = [*keys, *(["`load_in_4bit: true`"] if bits == 4 and not config.quantization.load_in_4bit else [])]
        # A quantised checkpoint cannot be loaded with other bits, and vLLM needs merged weights.
        is_refused = any(check_quantization("", model_config, quantized))
        has_fewer = bits == 16 and config.quantization.is_quantized
        if not changes or has_fewer or is_refused or (bits == 4 and config.engine.use_vllm):
            continue
        changed = {"recipe": recipe, "adapter": adapter, "model": model, "quantization": quantized}
        apply: Any = partial(dataclasses.replace, **changed)
        yield _Change(f"{how} on {bits}-bit weights ({', '.join(changes)})", apply)


def _join_keys(keys: Mapping[str, Any]) -> str:
    """Return keys as flags, quoted for a shell."""
    return shlex.join(word for key, value in keys.items() for word in (f"--{key}", json.dumps(value)))


def compose_flags(planned: PlannedLaunch, layout: Layout, file: str = "") -> str:
    """Return the flags of ``recipes launch`` for a layout.

    Args:
        planned: Launch of the layout.
        layout: The layout.
        file: Quoted path of a written launch file; empty for the shipped one, whose changes are then given in words.
    """
    sizes = [f"{name}_size {size}" for name, size in planned.launch.layout.sizes.items()]
    sizes += ["mixed_precision fp16"] if planned.launch.precision == "fp16" else []
    changes = f" with {', '.join(sizes)}" if sizes and not file else ""
    # A flag, because launch files of accelerate have no key for pipeline stages.
    stages = f" --pipeline_stages {layout.pipeline_stages}" if layout.pipeline_stages > 1 else ""
    return f"--hardware {file or layout.launch_file} --num_processes {planned.launch.world_size}{stages}{changes}"


def write_plan(
    folder: Path, recipe: Sequence[str], keys: Mapping[str, Any], layout: Layout, planned: PlannedLaunch
) -> None:
    """Write the launch file of a plan, the keys that it sets, and the command that starts the run.

    Args:
        folder: Folder to write.
        recipe: Recipe and keys of the run, as flags.
        keys: Keys that the plan sets.
        layout: Layout of the plan.
        planned: Launch of the layout.
    """
    with explain_write_errors(folder, "name another folder after --write"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("accelerate.yaml", dict(planned.document)), ("keys.yaml", dict(keys))):
            replace_text(folder / name, yaml.safe_dump(content, sort_keys=False))
        flags = compose_flags(planned, layout, shlex.quote(str(folder / "accelerate.yaml")))
        words = ["recipes launch", shlex.join(drop_flags(recipe, keys)), _join_keys(keys), flags]
        replace_text(folder / "launch.sh", " ".join(filter(None, words)) + "\n")

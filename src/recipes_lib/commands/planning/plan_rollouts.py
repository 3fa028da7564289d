"""``recipes plan`` for reinforcement learning: layout and time of an iteration, and hours of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Final

from transformers import PreTrainedConfig

from recipes_lib.commands.planning.plan_search import (
    PlannedRun,
    compose_flags,
    describe_misfit,
    is_supported,
    list_starts,
    verify_limits,
    write_plan,
)
from recipes_lib.commands.planning.planned_hardware import Hardware, Row
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.activations import list_keys
from recipes_lib.planning.devices import Device
from recipes_lib.planning.memory import plan_memory, resolve_checkpointing
from recipes_lib.planning.memory_plan import Layout, MemoryPlan
from recipes_lib.planning.rollouts import Iteration, estimate_iteration, list_readers
from recipes_lib.rl.rollout_schedule import RolloutSchedule, compute_group_schedule, compute_schedule

_MANY_PROMPTS: Final = 1_000_000_000
"""Placeholder for the number of prompts: planning reads no data, and the size of an iteration does not depend on it."""
_ITERATIONS: Final = 1_000
"""Iterations for which hours are given if the length of the run depends on its data."""


def search_rollouts(run: PlannedRun, hardware: Hardware) -> tuple[MemoryPlan, list[Row]]:
    """Return the memory plan of the layout with the fastest iteration, and rows about all layouts and its launch.

    Raises:
        ConfigError: The run fits in no layout, with the smallest change that would fit; no layout supports the recipe;
            or as ``verify_limits``.
    """
    config, model_config, device = run.config, run.model_config, hardware.device
    starts, refused = list_starts(model_config, hardware.num_gpus)
    tried, timed, verdicts = list[MemoryPlan](), list[tuple[float, MemoryPlan]](), list[str]()
    num_iterations = 0
    for layout, start in starts.items():
        if not is_supported(config, start, refused):
            continue
        plan = plan_memory(config, model_config, layout, device_bytes=device.memory)
        tried.append(plan)
        verdict = "does not fit"
        if plan.fits(device.memory):
            settled = resolve_checkpointing(config, plan)
            mfu = hardware.adapt_to(settled).mfu
            one, schedule = plan_iteration(settled, model_config, layout, device, hardware.peak, mfu)
            # Equal in every layout, since the batch is per GPU; unknown without `max_steps`.
            num_iterations = schedule.num_iterations if config.read("max_steps") > 0 else 0
            # Rounded as printed, so that layouts that print equal times count as equal.
            seconds = float(f"{one.seconds:.3g}")
            timed.append((seconds, plan))
            verdict = f"{seconds:g} s"
        verdicts.append(f"{start.name} {plan.peak / 1e9:.1f} GB, {verdict}")
    if not tried:
        raise ConfigError(*refused.values())
    if not timed:
        least = min(tried, key=attrgetter("peak"))
        if least.peak > device.memory:
            raise ConfigError(describe_misfit(run, hardware, least.peak / 1e9))
        raise ConfigError(describe_engine("--gpus", least, run.options.gpus))
    # `min` takes the first of equals, which shards least.
    seconds, best = min(timed, key=itemgetter(0))
    start = starts[best.layout]
    verify_limits(run.options, seconds * num_iterations / 3600, _add_server(config, hardware))
    if run.options.write:
        keys = list_keys(best.checkpointing) if best.choices else {}
        write_plan(run.options.write, run.flags, keys, best.layout, start)
    return best, [("layouts", "; ".join(verdicts)), ("launch", compose_flags(start, best.layout))]


def describe_engine(flag: str, plan: MemoryPlan, gpu: str) -> Problem:
    """Return the problem of a plan that fits the GPU, but whose colocated engine does not fit its share."""
    found = f"vLLM's weights and one answer do not fit its {plan.engine_share:.0%} of {gpu}"
    return Problem(flag, found, "raise `vllm_gpu_memory_utilization`, or name GPUs with more memory")


def describe_iteration(run: PlannedRun, layout: Layout, hardware: Hardware) -> Iterator[Row]:
    """Yield the estimated time of an iteration of reinforcement learning, and of the run, row by row.

    Raises:
        ConfigError: The answers of an iteration do not divide into batches.
    """
    config, device = run.config, hardware.device
    one, schedule = plan_iteration(config, run.model_config, layout, device, hardware.peak, hardware.mfu)
    answers = schedule.answers_per_iteration
    lengths = f"{one.answer:,} tokens after prompts of {one.prompt:,}"
    yield "iteration", f"{answers:,} answers of {lengths}, all of full length, passes: {schedule.update_epochs}"
    batches = f"{one.num_batches:,} batches of {one.batch:,}" if one.num_batches > 1 else f"{one.batch:,} answers"
    yield "sampling", f"{one.sampling:.3g} s: {batches} on each GPU, of {device.bandwidth / 1e12:.3g} TB/s"
    yield "scoring", f"{one.scoring:.3g} s: forward passes of {', '.join(list_readers(config))}"
    yield "updates", f"{one.updates:.3g} s" + (", while the server samples" if one.is_overlapped else "")
    yield "time", f"{one.seconds:.3g} s an iteration, an estimate for {layout.launch_file}"
    is_known = config.read("max_steps") > 0
    number = schedule.num_iterations if is_known else _ITERATIONS
    hours = one.seconds * number / 3600
    yield "", f"{hours:.1f} hours for {number:,} iterations"
    billed, of = _add_server(config, hardware), "" if is_known else f" for {number:,} iterations"
    if billed.num_gpus > hardware.num_gpus:
        of += f" on {billed.num_gpus:,} GPUs, half of them for the vLLM server"
    yield from billed.describe_bill(hours, of)


def _add_server(config: RecipeConfig, hardware: Hardware) -> Hardware:
    """Return the hardware with the GPUs of a vLLM server, which are assumed to be as many as those of training."""
    is_server = config.engine.use_vllm and config.engine.vllm_mode == "server"
    return replace(hardware, num_gpus=2 * hardware.num_gpus) if is_server else hardware


def plan_iteration(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, device: Device, peak: float, mfu: float
) -> tuple[Iteration, RolloutSchedule]:
    """Return the estimate of an iteration of reinforcement learning, and the schedule of the run.

    Args:
        config: Configuration of the run; without ``max_steps``, ``num_iterations`` of the schedule is meaningless.
        model_config: Configuration of the policy.
        layout: Parallel layout of the processes.
        device: GPU of each process.
        peak: Peak FLOP/s of the GPU.
        mfu: Model FLOPs utilisation, as for ``estimate_iteration``.

    Raises:
        ConfigError: The answers of an iteration do not divide into batches.
    """
    if config.recipe == "ppo":
        schedule = compute_schedule(_MANY_PROMPTS, config, layout.num_processes)
    else:
        schedule = compute_group_schedule(_MANY_PROMPTS, config, layout.num_processes)
    answers, passes = schedule.answers_per_iteration, schedule.update_epochs
    return estimate_iteration(config, model_config, answers, passes, layout, device, peak, mfu), schedule

"""``recipes plan``: GPU memory, time and schedule of a run, from its YAML alone; no data, weights or network.

Pretraining: tokens, hours and learning-rate schedule. Fine-tuning: time of an optimizer step. Reinforcement learning:
time of an iteration. All recipes: GPU memory.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from recipes_lib.commands.planning import plan_search
from recipes_lib.commands.planning.plan_search import PlannedRun
from recipes_lib.commands.planning.planned_hardware import UNLABELLED, Hardware, Row, calibrate, print_rows, read_proof
from recipes_lib.config.paths import find_launch_file
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.sources.mixtures import MAX_EPOCHS, REPEATED, compute_weights, list_entries, share_tokens
from recipes_lib.errors import ConfigError, DataError, Problem, raise_problems
from recipes_lib.files import read_record
from recipes_lib.planning import compute
from recipes_lib.planning.compute import RL_RECIPES, ModelSize
from recipes_lib.planning.devices import choose_device, find_efficiency, verify_peak
from recipes_lib.planning.memory import plan_memory, resolve_checkpointing
from recipes_lib.planning.memory_plan import Layout, MemoryPlan
from recipes_lib.planning.schedule import (
    PretrainingPlan,
    Schedule,
    compute_steps,
    count_run_tokens,
    list_quarters,
    plan_pretraining,
)
from recipes_lib.planning.timing import estimate_on_policy, list_costs, list_readers
from recipes_lib.quantities import format_figure, pluralize
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import name_pipeline, plan_launch, read_launch_file
from recipes_lib.training.layouts.memory_layout import build_layout

_PNG_POINTS: Final = 1200
_USUAL_GB: Final = (24, 48, 80, 141, 192)
"""Memory sizes of GPUs that a run is compared with if no GPU is named."""
_ITERATIONS: Final = 1_000
"""Iterations for which hours are given if the length of the run depends on its data."""


def run(
    config: RecipeConfig, options: argparse.Namespace, overrides: Sequence[str], problems: Sequence[Problem]
) -> None:
    """Run the command.

    Args:
        config: Configuration of the run.
        options: Flags, from ``flags.plan``.
        overrides: Flags of keys of the configuration.
        problems: Problems of the flags.

    Raises:
        ConfigError: A flag is invalid, the length of the run is unknown, the configuration of the
            model cannot be loaded, the PNG cannot be written, or the run does not fit the GPU.
    """
    # With --gpus, --num_processes is the number of processes that the batch keys of the recipe are written for.
    num_written = options.num_processes
    # Not by truth: an empty text, of an unset shell variable, is no number of GPUs.
    if options.gpus is not None:
        options.num_processes, options.gpu = _read_gpus(options.gpus)
    problems = [*_find_problems(config, num_written if options.gpus else None), *problems]
    raise_problems(problems, "recipes plan", ConfigError)
    num_processes, num_gpus, layouts = _choose_layouts(config, options)
    config = layouts[0].choose_compilation(config)
    hardware, recipe = _choose_hardware(config, options, num_gpus), config.recipe
    flags = ["--recipe", recipe, *(["--config", options.config] if options.config else []), *overrides]
    planned = PlannedRun(config, compute.find_planned_model(config), options, flags)
    memory = choose_device(options.gpu).memory if options.gpu else max(_USUAL_GB) * 1e9
    launch, plans = list[Row](), list[MemoryPlan]()
    if options.gpus:
        assert hardware is not None
        if recipe not in RL_RECIPES:
            print_rows(plan_search.search_plan(planned, hardware, num_written or num_gpus))
            return
        config, plan, launch = plan_search.search_rollouts(planned, hardware)
        plans = [plan]
    elif recipe != "pretrain" or options.gpu or options.hardware:
        plans = [plan_memory(config, planned.model_config, layout, device_bytes=memory) for layout in layouts]
    layout = layouts[0]
    if options.gpu and plans:
        # The first layout that fits, else the last.
        placed = next((plan for plan in plans if plan.fits(memory)), plans[-1])
        layout, planned = placed.layout, planned._replace(config=resolve_checkpointing(config, placed))
        if hardware and options.mfu is None:
            hardware = hardware.adapt_to(planned.config)
    rows = [*_describe(planned, num_processes, layout, hardware), *launch]
    print_rows([*rows, *([(UNLABELLED, "")] if rows and plans else [])])
    if plans:
        _print_memory(plans, options, num_gpus, memory)


def _describe(run: PlannedRun, num_processes: int, layout: Layout, hardware: Hardware | None) -> Iterator[Row]:
    """Yield the rows of the GPU and of the plan for this kind of recipe."""
    if hardware:
        yield from hardware.describe()
    if run.config.recipe == "pretrain":
        yield from _describe_pretraining(run, plan_pretraining(run.config, num_processes), layout, hardware)
    elif run.config.recipe not in RL_RECIPES:
        yield from _describe_step(run, num_processes, layout, hardware)
    elif hardware:
        yield from _describe_iteration(run, layout, hardware)


def _print_memory(plans: Sequence[MemoryPlan], options: argparse.Namespace, num_gpus: int, memory: float) -> None:
    """Print GPU memory per process for each layout, as planned for a device of ``memory`` bytes.

    Raises:
        ConfigError: The run fits in none of the layouts; scripts read the exit code.
    """
    devices = {options.gpu: memory} if options.gpu else {f"{size} GB": size * 1e9 for size in _USUAL_GB}
    lines = [line for plan in plans for line in plan.describe(devices, explains=options.explain)]
    sys.stdout.write("".join([f"{line}\n" for line in lines]))
    if not options.gpu or any(plan.fits(memory) for plan in plans):
        return
    least = min(plans, key=attrgetter("peak"))
    if least.peak <= memory:
        raise ConfigError(plan_search.describe_engine("--gpu", least, options.gpu))
    found = f"the run does not fit {options.gpu}: {least.peak / 1e9:.1f} GB at least, of {memory / 1e9:g} GB"
    # The search needs the peak of a GPU, which a size of memory does not have.
    name = options.gpu if choose_device(options.gpu).flops else "NAME"
    remedy = f"`recipes plan --gpus {shlex.quote(f'{num_gpus}x{name}')}` searches for what does"
    raise ConfigError(Problem("--gpu", found, remedy))


def _read_gpus(text: str) -> tuple[int, str]:
    """Return number and name of GPUs from ``8xH100``, ``8 * H100``, ``H100:8``, ``H100x8`` or ``2x8xH100``."""
    # A name with an x as a word, as in "2 nodes x 8 H100", has a number of its own.
    pattern = r"((?:\d+\s*[x*×]\s*|\d+\s+(?=[a-z]))+)(?!.*\bx\b)(\S.*)|(\D*\d.*?)\s*[:x*×]\s*(\d+)"
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    number = math.prod(map(int, re.findall(r"\d+", found[1] or found[4]))) if found else 0
    if not found or not 0 < number < 1_000_000:
        raise ConfigError(Problem("--gpus", f"{text!r} is not a number of GPUs", "write it as 8xH100"))
    return number, found[2] or found[3].strip()


def _choose_layouts(config: RecipeConfig, options: argparse.Namespace) -> tuple[int, int, list[Layout]]:
    """Return data-parallel size, number of GPUs, and the layouts to plan: with --hardware, that of the launch file.

    Raises:
        ConfigError: There is no such launch file, or it is incompatible with the recipe.
    """
    num_gpus, layouts, refused = options.num_gpus or options.num_processes, list[Layout](), list[Problem]()
    pipeline = name_pipeline(options.pipeline_stages, options.pipeline_schedule)
    is_chosen = options.hardware or options.pipeline_stages > 1
    usual = plan_search.REPLICATED_OR_SHARDED[1:] if (num_gpus or 1) > 1 else plan_search.REPLICATED_OR_SHARDED[:1]
    for file in map(find_launch_file, [options.hardware or "ddp"] if is_chosen else usual):
        launch = plan_launch(file, num_gpus, pipeline)
        try:
            # The precision of a file that nobody has chosen excludes nothing: it can be written in another one.
            verify_combination(config, launch if is_chosen else replace(launch, precision="no"), str(file))
        except ConfigError as error:
            refused += error.problems
        else:
            layouts.append(build_layout(launch, file.stem, config.read("gradient_accumulation_steps")))
    if not layouts:
        raise ConfigError(*refused)
    size = launch.data_size if is_chosen else options.num_processes or launch.data_size
    return size, launch.world_size, layouts


def _choose_hardware(config: RecipeConfig, options: argparse.Namespace, num_gpus: int) -> Hardware | None:
    """Return the planned hardware; ``None`` without ``--gpu``, and for a memory size, or for RL without a known peak.

    Raises:
        ConfigError: The GPU or its peak is unknown; or as ``read_proof`` and ``calibrate``.
        DataError: As ``calibrate``.
    """
    if options.gpu is None:
        return None
    device, measured = choose_device(options.gpu), None
    try:
        verify_peak(device, config)
    except ConfigError:
        # Memory can be planned without a peak; hours cannot.
        if options.gpus or (device.flops and config.recipe not in RL_RECIPES):
            raise
        return None
    if options.proof or options.calibrate:
        measured = read_proof(options.proof, device) if options.proof else calibrate(options.calibrate, device)
    share, source = find_efficiency(config, measured) if options.mfu is None else (options.mfu, "--mfu")
    price = config.evaluation.device_hour_price if options.price_per_gpu_hour is None else options.price_per_gpu_hour
    return Hardware(device, num_gpus, share, source, measured, price, options.pue, options.grid_gco2)


def _list_costs(run: PlannedRun, layout: Layout, hardware: Hardware, seconds: float) -> tuple[float, str]:
    """Return the seconds of a step, and the terms of its formula besides the ``seconds`` of its matrix products."""
    size = compute.compute_model_size(run.model_config).total
    costs = list_costs(run.config, run.model_config, size, layout, hardware.device, seconds, hardware.mfu)
    terms = [f" + {cost:.2g} s {name}" for name, cost in costs.items() if cost and name != "compute"]
    return sum(costs.values()), "".join(terms)


def _describe_pretraining(
    run: PlannedRun, plan: PretrainingPlan, layout: Layout, hardware: Hardware | None
) -> Iterator[Row]:
    """Yield the plan of a pretraining run, without ``hardware`` without hours; draw its schedule, if asked to.

    Raises:
        ConfigError: The model cannot be built, or the schedule cannot be written.
    """
    model_config, num_tokens = run.model_config, plan.num_tokens
    size = compute.compute_model_size(model_config)
    counted = compute.compute_flops_per_token(model_config, plan.max_length).total(num_tokens, num_tokens)
    yield "model", f"{model_config.model_type}, {size.total:,} parameters"
    yield "", f"{size.non_embedding:,} without embeddings"
    if size.active != size.total:
        yield "", f"{size.active:,} active per token"
    yield "tokens", f"{num_tokens:,}, {_compare_tokens(size, num_tokens)}"
    yield from _describe_epochs(run.config, num_tokens)
    yield "operations", f"{compute.compute_training_flops(size.active, num_tokens):.3g} by 6 x parameters x tokens"
    yield "", f"{counted:.3g} counted, with attention within rows of {plan.max_length:,} tokens"
    if hardware is None:
        yield "time", "name a GPU: --gpu H100 --num_processes 8"
    else:
        hours, gpus = hardware.compute_hours(counted), f"{hardware.num_gpus:,} {hardware.device.name}"
        formula = f"{counted:.3g} / ({hardware.describe_rate()} x 3600 s)"
        step = 3600 * hours * plan.schedule.full_tokens / num_tokens
        seconds, terms = _list_costs(run, layout, hardware, step)
        # With --num_gpus alone, the layout is not known: its processes are others than those of the batch.
        num_processes = plan.rows_per_micro_step // run.config.read("per_device_train_batch_size")
        if terms and layout.num_processes == num_processes:
            hours, formula = hours * seconds / step, f"{formula} x {seconds / step:.3g}: {step:.2g} s a step{terms}"
        yield "time", f"{format_figure(hours)} hours, {format_figure(hours / 24)} days, on {gpus}: {formula}"
        if run.options.save_seconds:
            hours, rows = _add_failures(hours, hardware.num_gpus, run.options, plan)
            yield from rows
        if math.isfinite(hours):
            yield from hardware.describe_bill(hours)
    yield from _describe_schedule(run.config, plan.schedule)
    if run.options.schedule:
        _draw(run.options.schedule, run.config, plan.schedule)
        yield "drawn", str(run.options.schedule)


def _describe_step(run: PlannedRun, num_processes: int, layout: Layout, hardware: Hardware | None) -> Iterator[Row]:
    """Yield size and time of an optimizer step of fine-tuning, and of the run; without ``hardware`` only the size.

    Raises:
        ConfigError: The configuration of the teacher cannot be loaded.
    """
    step = compute.count_step(run.config, run.model_config, num_processes)
    rows = pluralize(step.num_rows, "row")
    yield "step", f"{rows} of {step.length:,} tokens, {step.num_tokens:,} in all, if all are full"
    yield "operations", f"{step.num_flops:.3g} a step, with attention within rows of {step.length:,} tokens"
    if hardware is None:
        return
    seconds, terms = _list_costs(run, layout, hardware, 3600 * hardware.compute_hours(step.num_flops))
    if share := run.config.distillation.lmbda:
        found = estimate_on_policy(run.config, run.model_config, hardware.device, hardware.mfu)
        answers = f"{found.num_answers:,} answers of {run.config.rewards.response_length:,} tokens on each GPU"
        batches = f"{found.num_batches:,} batches of {found.batch:,} (`per_device_eval_batch_size`)"
        sampled = f"{found.seconds:.3g} s in {share:g} of the steps"
        yield "sampling", f"{sampled}: {answers}, as many as fit full rows with prompts as long; {batches}"
    hours, hours_per_token = seconds / 3600, seconds / 3600 / step.num_tokens
    formula = f"{step.num_flops:.3g} / ({hardware.describe_rate()}){terms}"
    yield "time", f"{seconds:{'.1f' if seconds >= 1 else '.2g'}} s a step: {formula}"
    yield "", f"{hours_per_token * 1e9:.1f} hours for 1,000,000,000 tokens of rows"
    if num_steps := compute_steps(run.options.num_rows, run.config.training, num_processes).num_steps:
        yield "", f"{format_figure(hours * num_steps)} hours for {pluralize(num_steps, 'step')}"
        yield from hardware.describe_bill(hours * num_steps)
    else:
        yield from hardware.describe_bill(hours_per_token * 1e9, " for 1,000,000,000 tokens of rows")


def _describe_iteration(run: PlannedRun, layout: Layout, hardware: Hardware) -> Iterator[Row]:
    """Yield the estimated time of an iteration of reinforcement learning, and of the run, row by row.

    Raises:
        ConfigError: The answers of an iteration do not divide into batches.
    """
    config, device = run.config, hardware.device
    one, schedule = plan_search.plan_iteration(config, run.model_config, layout, device, hardware.mfu)
    answers = schedule.answers_per_iteration
    prompt, answer = one.lengths
    lengths = f"{answer:,} tokens after prompts of {prompt:,}"
    yield "iteration", f"{answers:,} answers of {lengths}, all of full length, passes: {schedule.update_epochs}"
    batch, num_batches = one.decoding.batch, one.decoding.num_batches
    batches = f"{num_batches:,} batches of {batch:,}" if num_batches > 1 else pluralize(batch, "answer")
    yield "sampling", f"{one.sampling:.3g} s: {batches} on each GPU, of {device.bandwidth / 1e12:.3g} TB/s"
    yield "scoring", f"{one.scoring:.3g} s: forward passes of {', '.join(list_readers(config))}"
    yield "updates", f"{one.updates:.3g} s" + (", while the server samples" if one.is_overlapped else "")
    yield "time", f"{one.seconds:.3g} s an iteration, an estimate for {layout.launch_file}"
    is_known = config.read("max_steps") > 0
    number = schedule.num_iterations if is_known else _ITERATIONS
    hours = one.seconds * number / 3600
    yield "", f"{format_figure(hours)} hours for {pluralize(number, 'iteration')}"
    num_gpus, of = plan_search.count_gpus(config, hardware.num_gpus), "" if is_known else f" for {number:,} iterations"
    if num_gpus > hardware.num_gpus:
        of += f" on {num_gpus:,} GPUs, half of them for the vLLM server"
    yield from hardware._replace(num_gpus=num_gpus).describe_bill(hours, of)


def _find_problems(config: RecipeConfig, num_written: int | None) -> Iterator[Problem]:
    """Yield what planning needs of a recipe; ``num_written`` is ``--num_processes`` beside ``--gpus``."""
    recipe = config.recipe
    if recipe == "pretrain" and config.pretraining.max_tokens is None and config.read("max_steps") < 1:
        found = "the length of the run is in epochs, and planning reads no data"
        yield Problem("max_tokens", found, "write `max_tokens: ...` or `max_steps: ...`")
    if recipe not in RL_RECIPES and config.tokens.max_length is None:
        found = "the row length depends on the data, and planning reads none"
        yield Problem("max_length", found, "write `max_length: ...`")
    if recipe in RL_RECIPES and num_written:
        found = f"the batch of {recipe} is per process, and there is one for each of --gpus"
        yield Problem("--num_processes", found, "remove it")


def _compare_tokens(size: ModelSize, num_tokens: int) -> str:
    """Return the tokens per parameter, in comparison with the Chinchilla rule."""
    ratio = num_tokens / size.active
    factor = ratio / compute.TOKENS_PER_PARAMETER
    text = f"{ratio:,.1f} per parameter; the Chinchilla rule is {compute.TOKENS_PER_PARAMETER:.0f}: "
    return text + (f"over-trained by {factor:,.2f}" if factor >= 1 else f"under-trained by {1 / factor:,.2f}")


def _describe_epochs(config: RecipeConfig, num_tokens: int) -> Iterator[Row]:
    """Yield the epochs over each source, if all are corpora of ``recipes clean``, whose manifests count tokens."""
    entries = list_entries(config.data)
    sizes = [count_corpus_tokens(str(entry["name"])) for entry in entries]
    known = [size for size in sizes if size]
    if len(known) < len(entries):
        return
    shares = share_tokens(config, num_tokens, compute_weights(config, known))
    for entry, share, size in zip(entries, shares, known, strict=True):
        epochs = share / size
        warning = f"; {REPEATED}" if epochs > MAX_EPOCHS else ""
        yield "epochs", f"{epochs:,.2f} of the {size:,} tokens of {entry['name']}{warning}"


def count_corpus_tokens(name: str) -> int | None:
    """Return the number of tokens of a corpus or of one of its sources, from its manifest; ``None`` without one."""
    place = Path(name)
    is_whole = (place / "corpus.json").is_file()
    try:
        # The folder of a source: CORPUS/data/SOURCE.
        manifest = read_record((place if is_whole else place.parent.parent) / "corpus.json", {"shards": list})
        named = ((Path(shard["path"]).parent.name, int(shard["tokens"])) for shard in manifest["shards"])
        return sum(number for source, number in named if is_whole or source == place.name)
    except (DataError, KeyError, TypeError):
        return None


class Failures(NamedTuple):
    """Failure model of a run, in seconds.

    Attributes:
        mean_seconds: Mean time between failures of the whole job, which stops if any of its GPUs fails.
        save_seconds: Time that training waits for a checkpoint; if it is written asynchronously, only the pause.
        restart_seconds: Time from a failure to the first step after it, without recomputing lost steps.
    """

    mean_seconds: float
    save_seconds: float
    restart_seconds: float

    def compute_interval(self) -> float:
        """Return the optimal interval between checkpoints, in seconds of training.

        Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37:
        Young's ``sqrt(2 * save * mean)`` with two more terms; the mean itself if saving takes more than twice as long.
        """
        ratio = self.save_seconds / (2 * self.mean_seconds)
        if ratio >= 1:
            return self.mean_seconds
        young = math.sqrt(2 * self.save_seconds * self.mean_seconds)
        return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_seconds

    def compute_goodput(self, interval: float) -> float:
        """Return the goodput: the expected share of time, in [0, 1], without saving, restarts and lost steps.

        Args:
            interval: Seconds of training between two checkpoints, above 0.

        Source: Daly 2006, equation 20: failures are exponentially distributed, and also happen during restarts;
        compared with a simulation in ``tests/commands/planning/test_plan_failures.py``.
        """
        mean = self.mean_seconds
        exponent = (interval + self.save_seconds) / mean
        # The goodput is 0 in float64, and `expm1` would overflow.
        if exponent + self.restart_seconds / mean > 700:
            return 0.0
        return interval / (mean * math.exp(self.restart_seconds / mean) * math.expm1(exponent))


def _add_failures(
    hours: float, num_gpus: int, options: argparse.Namespace, plan: PretrainingPlan
) -> tuple[float, list[Row]]:
    """Return hours including saving, restarts and lost work, and rows about them and the save interval."""
    # A failure of any GPU stops the run.
    failures = Failures(options.failure_hours * 3600 / num_gpus, options.save_seconds, options.restart_seconds)
    # Time of a step of full size: with a batch-size warm-up, the first steps are shorter.
    step_seconds = hours * 3600 * plan.schedule.full_tokens / plan.num_tokens
    num_steps = min(max(round(failures.compute_interval() / step_seconds), 1), plan.num_steps)
    interval = num_steps * step_seconds
    goodput = failures.compute_goodput(interval)
    total = f"{format_figure(hours / goodput)} hours in all" if goodput else "it would never end"
    return hours / goodput if goodput else math.inf, [
        ("failures", f"one in {failures.mean_seconds / 3600:,.1f} hours, by --failure_hours"),
        ("", f"save_steps: {num_steps:,}, every {interval / 60:,.1f} minutes, is optimal"),
        ("", f"goodput {goodput:.1%}: {total}"),
    ]


def _describe_schedule(config: RecipeConfig, schedule: Schedule) -> Iterator[Row]:
    starts, peak = schedule.token_starts, float(config.training["learning_rate"])
    batches = np.diff(starts)
    yield "steps", f"{schedule.num_steps:,}"
    if batches[0] == batches[-1]:
        yield "batch", f"{batches[0]:,} tokens"
    else:
        full = int(np.argmax(batches == batches[-1]))
        grown = f"from {batches[0]:,} to {batches[-1]:,} tokens, reached at step {full:,}, {starts[full]:,} tokens"
        yield "batch", grown
    yield "warm-up", f"{pluralize(schedule.num_warmup_steps, 'step')}, {schedule.warmup_tokens:,} tokens"
    if (first := schedule.first_decay_step) is not None:
        yield "decay", f"from step {first:,}, {starts[first]:,} tokens, over {schedule.decay_tokens:,}"
    rates = ", ".join(f"{peak * factor:.3g}" for factor in schedule.factors(list_quarters(schedule.num_steps)))
    yield "learning rate", f"{rates} at 0, 25, 50, 75, 100 % of the steps"


def _draw(path: Path, config: RecipeConfig, schedule: Schedule) -> None:
    from recipes_lib.report.charts import draw_schedule

    starts = schedule.token_starts
    even = np.searchsorted(starts, np.linspace(0, int(starts[-1]) - 1, _PNG_POINTS), side="right") - 1
    # Additional points in the warm-up, which may be shorter than the spacing of the even ones.
    corners = np.linspace(0, min(schedule.num_warmup_steps, schedule.num_steps - 1), 20).astype(int)
    steps = np.unique(np.concatenate([even, corners, [schedule.first_decay_step or 0, schedule.num_steps - 1]]))
    tokens = np.append(starts[steps], starts[-1])
    steps = np.append(steps, steps[-1])  # The last step lasts to the end of the run.
    rates = float(config.training["learning_rate"]) * schedule.factors(steps)
    draw_schedule(path, tokens.tolist(), rates.tolist(), np.diff(starts)[steps].tolist())


class StagePlan(NamedTuple):
    """Estimate for a stage: GPUs, peak bytes of memory on each, hours (``None``: unknown), and whether it fits them."""

    num_gpus: int
    memory: int | None = None
    hours: float | None = None
    fits: bool = True


def plan_stage(
    config: RecipeConfig, launch_file: str, gpu: str, num_processes: int | None, shape: Path | None
) -> StagePlan:
    """Return the estimate for a stage of a pipeline.

    Args:
        config: Configuration of the stage.
        launch_file: Name or path of its launch file; empty for a single process.
        gpu: Name of the GPU.
        num_processes: Processes, if the launch file is for several; ``None``: the number in the launch file.
        shape: Folder for the configuration of the model, from which later stages are planned; ``None`` to omit it.

    Raises:
        ConfigError: The model's configuration cannot be loaded, the GPU or its peak is unknown, or recipe and launch
            file are incompatible.
    """
    device, file = choose_device(gpu), find_launch_file(launch_file) if launch_file else None
    verify_peak(device, config)
    is_alone = file is None or read_launch_file(file)["distributed_type"] == "NO"
    launch = plan_launch(file, None if is_alone else num_processes)
    verify_combination(config, launch, str(file or "the launch"))
    model_config = compute.find_planned_model(config)
    if shape is not None:
        model_config.save_pretrained(shape)
    num_steps, gpus, is_rl = config.read("max_steps"), launch.world_size, config.recipe in RL_RECIPES
    if config.tokens.max_length is None and not is_rl:
        return StagePlan(gpus)
    layout = build_layout(launch, launch_file or "single_gpu", config.read("gradient_accumulation_steps"))
    config = layout.choose_compilation(config)
    plan = plan_memory(config, model_config, layout, device_bytes=device.memory)
    config, hours = resolve_checkpointing(config, plan), None
    mfu, _ = find_efficiency(config)
    if not is_rl:
        step = compute.count_step(config, model_config, launch.data_size)
        is_pretraining = config.recipe == "pretrain"
        tokens = count_run_tokens(config, launch.data_size) if is_pretraining else num_steps * step.num_tokens
        if tokens is not None and tokens > 0:
            size = compute.compute_model_size(model_config).total
            seconds = 3600 * compute.compute_hours(step.num_flops, gpus, device.flops, mfu)
            costs = list_costs(config, model_config, size, layout, device, seconds, mfu)
            hours = sum(costs.values()) / 3600 * tokens / step.num_tokens
    elif num_steps > 0:
        one, schedule = plan_search.plan_iteration(config, model_config, layout, device, mfu)
        hours = one.seconds * schedule.num_iterations / 3600
    return StagePlan(plan_search.count_gpus(config, gpus), plan.peak, hours, plan.fits(device.memory))

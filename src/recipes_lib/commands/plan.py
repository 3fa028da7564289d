"""``recipes plan``: what a run is, takes and holds, from its YAML alone; no data, weights or network.

Of a pretraining run it tells tokens, hours and schedule, of fine-tuning a step and its time; of every stage the memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from recipes_lib.commands.clean import plan as plan_corpus
from recipes_lib.config.loader import add_recipe_flags, load_for_command, split_stage
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import STAGES
from recipes_lib.data.sources.mixtures import MAX_EPOCHS, compute_weights, list_entries
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record
from recipes_lib.models.architecture import find_model_config
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.planning.compute import (
    RL_STAGES,
    TOKENS_PER_PARAMETER,
    ModelSize,
    compute_flops_per_token,
    compute_hours,
    compute_model_size,
    compute_training_flops,
    count_step,
    find_peak,
)
from recipes_lib.planning.failures import GPU_HOURS_BETWEEN_FAILURES, Failures
from recipes_lib.planning.memory import list_devices, list_layouts, plan_memory
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.pretraining import PretrainingPlan, plan_pretraining
from recipes_lib.planning.schedule import Schedule
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    add_pipeline_flags,
    find_launch_file,
    name_pipeline,
    plan_launch,
)

_SHARES_OF_A_RUN: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 64
_PNG_POINTS: Final = 1200
_LABEL_WIDTH: Final = 16
_MFU: Final = 0.4


class Hardware(NamedTuple):
    """What a run is to run on.

    Attributes:
        gpu: Name of the GPU, such as ``H100``.
        num_gpus: How many.
        mfu: Share of their peak that is of use, above 0 and at most 1.
        failures: What interruptions of these GPUs together cost; ``None`` to tell nothing of them.
    """

    gpu: str
    num_gpus: int
    mfu: float
    failures: Failures | None


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The configuration or a flag is wrong, the run has no known length, the model's configuration cannot
            be had, or the PNG cannot be written.
    """
    stage, rest = split_stage(argv, (*STAGES, "corpus"))
    if stage == "corpus":
        plan_corpus(rest)
        return
    parser = argparse.ArgumentParser(prog="recipes plan", description=__doc__, allow_abbrev=False)
    add_recipe_flags(parser)
    parser.add_argument("--num_processes", type=int, help="data-parallel processes (default: one for each GPU, or 1)")
    parser.add_argument("--gpu", help="GPU that has to hold the run, and to tell the time on, such as H100")
    parser.add_argument("--num_gpus", type=int, help="pretraining: how many (default: one for each process)")
    parser.add_argument("--mfu", type=float, help=f"share of the peak that is of use (default: {_MFU})")
    parser.add_argument("--schedule", type=Path, metavar="PNG", help="pretraining: draw learning rate and batch")
    parser.add_argument(
        "--hardware", help="launch file to plan for: of accelerate_configs/, or path (default: several)"
    )
    parser.add_argument("--explain", action="store_true", help="say how each component of the memory is counted")
    _add_failure_flags(parser)
    add_pipeline_flags(parser)
    options, overrides = parser.parse_known_args(argv)
    config = load_for_command(stage, overrides, options.config)
    if problems := list(_find_problems(config, options)):
        raise ConfigError(*problems)
    num_processes, num_gpus, layouts = _choose_layouts(config, options)
    failures = None
    if options.save_seconds:
        mean_seconds = options.failure_hours * 3600 / num_gpus
        failures = Failures(mean_seconds, options.save_seconds, options.restart_seconds)
    hardware = Hardware(options.gpu, num_gpus, options.mfu or _MFU, failures) if options.gpu else None
    model_config, lines = _find_model_config(config), list[str]()
    if stage == "pretrain":
        plan = plan_pretraining(config, num_processes)
        lines += describe_pretraining(config, model_config, plan, hardware)
    elif stage not in RL_STAGES:
        lines += describe_step(config, model_config, num_processes, hardware)
    if stage != "pretrain" or hardware or options.hardware:
        devices = list_devices(options.gpu)
        lines += [""] if stage == "pretrain" else []
        for layout in layouts:
            lines += plan_memory(config, model_config, layout).describe(devices, explains=options.explain)
    sys.stdout.write("".join([f"{line}\n" for line in lines]))
    if options.schedule:
        _draw(options.schedule, config, plan.schedule)
        sys.stdout.write(f"{options.schedule}\n")


def _add_failure_flags(parser: argparse.ArgumentParser) -> None:
    told = "pretraining: seconds that training waits for a checkpoint; tells how often to save, and hours with failures"
    parser.add_argument("--save_seconds", type=float, help=told)
    told = "seconds from a failure to the first step after it (default: %(default)g)"
    parser.add_argument("--restart_seconds", type=float, default=300.0, help=told)
    told = "hours of one GPU between failures (default: %(default).0f, those of Llama 3)"
    parser.add_argument("--failure_hours", type=float, default=GPU_HOURS_BETWEEN_FAILURES, help=told)


def _choose_layouts(config: RecipeConfig, options: argparse.Namespace) -> tuple[int, int, list[Layout]]:
    """Return how many processes take rows of their own, the GPUs, and the layouts to plan: one if it is named.

    Raises:
        ConfigError: There is no such launch file, or the recipe and it do not fit together.
    """
    num_gpus: int | None = options.num_gpus or options.num_processes
    if not options.hardware and options.pipeline_stages == 1:
        layouts = list(list_layouts(config, num_gpus or 1))
        return options.num_processes or num_gpus or 1, num_gpus or 1, layouts
    file = find_launch_file(options.hardware or "ddp")
    launch = plan_launch(file, num_gpus, name_pipeline(options.pipeline_stages, options.pipeline_schedule))
    verify_combination(config, launch, str(file))
    layout = build_layout(launch, file.stem, config.read("gradient_accumulation_steps"))
    return launch.data_size, launch.world_size, [layout]


def describe_pretraining(
    config: RecipeConfig, model_config: PreTrainedConfig, plan: PretrainingPlan, hardware: Hardware | None
) -> Iterator[str]:
    """Yield what a pretraining run is, line by line.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        plan: From ``plan_pretraining``.
        hardware: What to tell the hours on; ``None`` to tell none.

    Raises:
        ConfigError: The model cannot be built, or the peak of the GPU is not known.
    """
    size, num_tokens = compute_model_size(model_config), plan.num_tokens
    counted = compute_flops_per_token(model_config, plan.max_length).total(num_tokens, num_tokens)
    yield _label("model", f"{model_config.model_type}, {size.total:,} parameters")
    yield _label("", f"{size.non_embedding:,} without embeddings")
    if size.active != size.total:
        yield _label("", f"{size.active:,} active for a token")
    yield _label("tokens", f"{num_tokens:,}, {_judge_tokens(size, num_tokens)}")
    yield from _describe_epochs(config, num_tokens)
    yield _label("operations", f"{compute_training_flops(size.active, num_tokens):.3g} by 6 x parameters x tokens")
    yield _label("", f"{counted:.3g} counted, every token attending to the {plan.max_length:,} of its row")
    yield from _describe_hours(counted, hardware, config)
    if hardware and hardware.failures:
        hours = compute_hours(counted, hardware.num_gpus, find_peak(hardware.gpu, config), hardware.mfu)
        yield from _describe_failures(hours, hardware.failures, plan)
    yield from _describe_schedule(config, plan.schedule)


def describe_step(
    config: RecipeConfig, model_config: PreTrainedConfig, num_processes: int, hardware: Hardware | None
) -> Iterator[str]:
    """Yield what an optimizer step of fine-tuning is and takes, line by line.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        num_processes: Its data-parallel processes.
        hardware: What to tell the time on; ``None`` to tell none.

    Raises:
        ConfigError: The teacher's configuration cannot be had, or the GPU is not known.
    """
    step = count_step(config, model_config, num_processes)
    yield f"a step: {step.num_rows:,} rows of {step.length:,} tokens, {step.num_tokens:,} in all, if all are full"
    yield f"operations: {step.num_flops:.3g} a step"
    if hardware is None:
        return
    gpu, num_gpus, mfu, _ = hardware
    peak = find_peak(gpu, config)
    hours = compute_hours(step.num_flops, num_gpus, peak, mfu)
    seconds, hours_per_token = hours * 3600, hours / step.num_tokens
    told = f"{step.num_flops:.3g} / ({num_gpus} GPUs x {peak:.3g} FLOP/s x {mfu:g} MFU)"
    yield f"time: {seconds:{'.1f' if seconds >= 1 else '.2g'}} s a step: {told}"
    yield f"      {hours_per_token * 1e9:.1f} hours for 1,000,000,000 tokens of rows"
    if (num_steps := config.read("max_steps")) > 0:
        yield f"      {hours * num_steps:.1f} hours for {num_steps:,} steps"
    if (price := config.evaluation.device_hour_price) is not None:
        cost = hours_per_token * num_gpus * price * 1e9
        yield f"cost: {cost:,.2f} for 1,000,000,000 tokens of rows, at {price:g} for a device hour"


def build_layout(launch: Launch, name: str, num_batches: int) -> Layout:
    """Return how the processes of a launch hold a model.

    Args:
        launch: Of ``plan_launch``.
        name: Of the launch file.
        num_batches: Micro-batches of an optimizer step.
    """
    layout, stages = launch.layout, launch.layout.stages
    zero = {"FSDP": 3, "DEEPSPEED": layout.zero_stage}.get(launch.engine, 0)
    size = launch.world_size // (launch.tensor_size * stages * layout.sizes.get("dp_replicate", 1))
    weights, gradients, states = (size if zero >= least else 1 for least in (3, 2, 1))
    if layout.offloads_optimizer or layout.offloads_weights:
        weights, gradients, states = 0 if layout.offloads_weights else weights, 0, 0
    # The first stage is ahead of the last by as many micro-batches as there are stages between them; of two chunks in
    # turns it holds half of those twice (Narayanan et al. 2021, section 2.2).
    in_flight = {"1f1b": min(stages, num_batches), "gpipe": num_batches, "interleaved": stages + (stages - 1) / 2}
    return Layout(
        launch_file=name,
        num_processes=launch.data_size,
        shards=Held(weights, gradients, states),
        tensor=launch.tensor_size,
        context=launch.context_size,
        gathers_keys=launch.context_size > 1 and not launch.shares_by_heads,
        stages=stages,
        in_flight=in_flight[layout.schedule] if stages > 1 else 1,
        is_deepspeed=launch.engine == "DEEPSPEED",
    )


def draw_curve(values: Sequence[float], height: int) -> list[str]:
    """Return ``height`` lines of block characters, a column for each value; the highest value fills its column.

    Args:
        values: At least one, none below 0. What is above 0 is drawn, however small.
        height: Lines.
    """
    eighths = len(_BLOCKS) - 1
    top = max(values) or 1.0
    levels = [max(round(value / top * height * eighths), int(value > 0)) for value in values]
    return [
        "".join(_BLOCKS[min(max(level - line * eighths, 0), eighths)] for level in levels)
        for line in reversed(range(height))
    ]


def _find_problems(config: RecipeConfig, options: argparse.Namespace) -> Iterator[Problem]:
    stage = config.stage
    if stage == "pretrain" and config.pretraining.max_tokens is None and config.read("max_steps") < 1:
        found = "the length of the run is in epochs, and a plan reads no data"
        yield Problem("max_tokens", found, "write `max_tokens: ...` or `max_steps: ...`")
    if stage not in ("pretrain", *RL_STAGES) and config.tokens.max_length is None:
        found = "the length of the rows follows from the data, and a plan reads none"
        yield Problem("max_length", found, "write `max_length: ...`")
    if stage != "pretrain" and options.num_gpus is not None:
        found = "is a flag of pretraining, where several GPUs may share a row; here a process has a GPU"
        yield Problem("--num_gpus", found, "write --num_processes, the number of GPUs")
    if stage != "pretrain" and options.schedule is not None:
        yield Problem("--schedule", "is a flag of pretraining", "remove it")
    if stage in RL_STAGES and options.mfu is not None:
        yield Problem("--mfu", f"of {stage} memory alone is told", "remove it")
    for flag in ("num_processes", "num_gpus"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            yield Problem(f"--{flag}", f"is {value}", "write 1 or more")
    yield from _find_failure_problems(stage, options)
    if options.mfu is not None and not 0 < options.mfu <= 1:
        yield Problem("--mfu", f"is {options.mfu}", f"write a share above 0, at most 1; {_MFU} is usual")


def _find_failure_problems(stage: str, options: argparse.Namespace) -> Iterator[Problem]:
    if options.save_seconds is None:
        return
    if stage != "pretrain":
        yield Problem("--save_seconds", "is a flag of pretraining", "remove it")
    elif options.gpu is None:
        yield Problem("--save_seconds", "failures are counted in hours on a GPU", "name one: --gpu H100")
    for flag in ("save_seconds", "restart_seconds", "failure_hours"):
        if not 0 < (value := getattr(options, flag)) < math.inf:
            yield Problem(f"--{flag}", f"is {value:g}", "write a finite number above 0")


def _find_model_config(config: RecipeConfig) -> PreTrainedConfig:
    """Return the architecture; the tokenizer is asked for nothing but a ``vocab_size`` that the recipe leaves out.

    Raises:
        ConfigError: It is wrong, or neither it nor the tokenizer says how many rows the embedding has.
    """
    architecture = config.model.model_config
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
    if architecture is not None and "vocab_size" not in architecture:
        try:
            tokenizer = load_tokenizer(config.model, config.tokens)
        except ConfigError as error:
            remedy = "write `vocab_size` in `model_config`: a plan needs nothing else of the tokenizer"
            raise ConfigError(*(Problem(one.where, one.found, remedy) for one in error.problems)) from error
    return find_model_config(config.model, tokenizer, config.tokens.max_length)[0]


def _judge_tokens(size: ModelSize, num_tokens: int) -> str:
    ratio = num_tokens / size.active
    factor = ratio / TOKENS_PER_PARAMETER
    told = f"{ratio:,.1f} a parameter; the rule of Chinchilla is {TOKENS_PER_PARAMETER:.0f}: "
    return told + (f"over-trained by {factor:,.2f}" if factor >= 1 else f"under-trained by {1 / factor:,.2f}")


def _describe_epochs(config: RecipeConfig, num_tokens: int) -> Iterator[str]:
    """Yield how often each source is read, where all of them are corpora whose tokens `recipes clean` has counted."""
    entries = list_entries(config.data)
    sizes = [count_corpus_tokens(str(entry["name"])) for entry in entries]
    known = [size for size in sizes if size]
    if len(known) < len(entries) or config.pretraining.dataset_curriculum is not None:
        return
    for entry, share, size in zip(entries, compute_weights(config, known), known, strict=True):
        epochs = share * num_tokens / size
        warning = f"; beyond {MAX_EPOCHS} a repeated token teaches little" if epochs > MAX_EPOCHS else ""
        yield _label("epochs", f"{epochs:,.2f} of the {size:,} tokens of {entry['name']}{warning}")


def count_corpus_tokens(name: str) -> int | None:
    """Return the tokens of a corpus, or of one source in its folder, by its manifest; ``None`` where there is none."""
    place = Path(name)
    try:
        if (place / "corpus.json").is_file():
            shards = read_record(place / "corpus.json", {"shards": list})["shards"]
        else:
            manifest = read_record(place.parent.parent / "corpus.json", {"shards": list})
            shards = [shard for shard in manifest["shards"] if Path(shard["path"]).parent.name == place.name]
        return sum(int(shard["tokens"]) for shard in shards)
    except (DataError, KeyError, TypeError):
        return None


def _describe_hours(num_flops: float, hardware: Hardware | None, config: RecipeConfig) -> Iterator[str]:
    """Yield the hours, how they are computed, and their cost.

    Raises:
        ConfigError: The peak of the GPU is not known.
    """
    if hardware is None:
        yield _label("time", f"name a GPU: --gpu H100 --num_processes 8 --mfu {_MFU}")
        return
    gpu, num_gpus, mfu, _ = hardware
    peak = find_peak(gpu, config)
    hours = compute_hours(num_flops, num_gpus, peak, mfu)
    formula = f"{num_flops:.3g} / ({num_gpus} GPUs x {peak:.3g} FLOP/s x {mfu:g} MFU x 3600 s)"
    yield _label("time", f"{hours:,.1f} hours, {hours / 24:,.1f} days, on {num_gpus:,} {gpu}: {formula}")
    if (price := config.evaluation.device_hour_price) is not None:
        yield _label("cost", f"{hours * num_gpus * price:,.2f}, at {price:g} for a device hour")


def _describe_failures(hours: float, failures: Failures, plan: PretrainingPlan) -> Iterator[str]:
    """Yield how often to save, and the hours with saving, restarts and work done twice."""
    step_seconds = hours * 3600 * plan.schedule.full_tokens / plan.num_tokens
    num_steps = max(round(failures.compute_interval() / step_seconds), 1)
    interval = num_steps * step_seconds
    goodput = failures.compute_goodput(interval)
    yield _label("failures", f"one in {failures.mean_seconds / 3600:,.1f} hours, by the rate of --failure_hours")
    yield _label("", f"save_steps: {num_steps:,}, every {interval / 60:,.1f} minutes, loses least")
    total = f"{hours / goodput:,.1f} hours in all" if goodput else "it would never end"
    yield _label("", f"{goodput:.1%} of the time trains: {total}")


def _describe_schedule(config: RecipeConfig, schedule: Schedule) -> Iterator[str]:
    starts, peak = schedule.token_starts, float(config.training["learning_rate"])
    batches = np.diff(starts)
    yield _label("steps", f"{schedule.num_steps:,}")
    if batches[0] == batches[-1]:
        yield _label("batch", f"{batches[0]:,} tokens")
    else:
        full = int(np.argmax(batches == batches[-1]))
        grown = f"from {batches[0]:,} to {batches[-1]:,} tokens, reached at step {full:,}, {starts[full]:,} tokens"
        yield _label("batch", grown)
    yield _label("warm-up", f"{schedule.num_warmup_steps:,} steps, {schedule.warmup_tokens:,} tokens")
    if (first := schedule.first_decay_step) is not None:
        yield _label("decay", f"from step {first:,}, {starts[first]:,} tokens, over {schedule.decay_tokens:,}")
    steps = [round(share * (schedule.num_steps - 1)) for share in _SHARES_OF_A_RUN]
    rates = ", ".join(f"{peak * factor:.3g}" for factor in schedule.factors(steps))
    yield _label("learning rate", f"{rates} at 0, 25, 50, 75, 100 % of the steps")
    steps = _find_steps(schedule, np.linspace(0, int(starts[-1]) - 1, _CURVE_WIDTH))
    yield ""
    yield from draw_curve(schedule.factors(steps).tolist(), 6)
    yield f"learning rate, up to {peak:.3g}, over the tokens trained on"
    if batches[0] != batches[-1]:
        yield ""
        yield from draw_curve(batches[steps].tolist(), 3)
        yield f"tokens in a step, up to {batches[-1]:,}, over the tokens trained on"


def _find_steps(schedule: Schedule, tokens: Any) -> Any:
    """Return the step that each of these tokens is trained on in."""
    return np.searchsorted(schedule.token_starts, tokens, side="right") - 1


def _draw(path: Path, config: RecipeConfig, schedule: Schedule) -> None:
    from recipes_lib.report.charts import draw_schedule

    starts = schedule.token_starts
    even = _find_steps(schedule, np.linspace(0, int(starts[-1]) - 1, _PNG_POINTS))
    # Where the curve has corners, however short the warm-up is beside the run.
    corners = np.linspace(0, min(schedule.num_warmup_steps, schedule.num_steps - 1), 20).astype(int)
    steps = np.unique(np.concatenate([even, corners, [schedule.first_decay_step or 0, schedule.num_steps - 1]]))
    tokens = np.append(starts[steps], starts[-1])
    steps = np.append(steps, steps[-1])  # The last step lasts to the end of the run.
    rates = float(config.training["learning_rate"]) * schedule.factors(steps)
    draw_schedule(path, tokens.tolist(), rates.tolist(), np.diff(starts)[steps].tolist())


def _label(name: str, text: str) -> str:
    return f"{name:{_LABEL_WIDTH}}{text}"

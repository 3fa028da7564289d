"""``recipes plan``: what a pretraining run is, costs and does, from its YAML alone; no data, weights or network.

Of PPO it tells the memory (``plan_ppo``), of the other stages memory and time of a step (``plan_tuning``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recipes_lib.commands import plan_ppo, plan_tuning
from recipes_lib.config.loader import add_recipe_flags, load_for_command, split_stage
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes_lib.planning.compute import ModelSize
    from recipes_lib.planning.pretraining import PretrainingPlan
    from recipes_lib.planning.schedule import Schedule

_SHARES_OF_A_RUN: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 64
_PNG_POINTS: Final = 1200
_LABEL_WIDTH: Final = 16


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run is to run on.

    Attributes:
        gpu: Name of the GPU, such as ``H100``.
        num_gpus: How many.
        mfu: Share of their peak that is of use, above 0 and at most 1.
    """

    gpu: str
    num_gpus: int
    mfu: float


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The configuration or a flag is wrong, the run has no known length, or the PNG cannot be written.
    """
    stage, _ = split_stage(argv)
    if stage != "pretrain":
        _verify_no_gpus(argv)
        (plan_ppo if stage == "ppo" else plan_tuning).main(argv)
        return
    parser = argparse.ArgumentParser(prog="recipes plan", description=__doc__, allow_abbrev=False)
    add_recipe_flags(parser)
    parser.add_argument("--num_processes", type=int, help="data-parallel processes (default: one for each GPU, or 1)")
    parser.add_argument("--gpu", help="GPU to tell the hours on, such as H100")
    parser.add_argument("--num_gpus", type=int, help="how many (default: one for each process)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is of use (default: 0.4)")
    parser.add_argument("--schedule", type=Path, metavar="PNG", help="draw learning rate and batch into this file")
    options, overrides = parser.parse_known_args(argv)
    if options.num_processes is None:
        options.num_processes = 1 if options.num_gpus is None else options.num_gpus
    config = load_for_command(stage, overrides, options.config)
    if problems := list(_find_problems(config, options)):
        raise ConfigError(*problems)
    num_gpus = options.num_processes if options.num_gpus is None else options.num_gpus
    hardware = Hardware(options.gpu, num_gpus, options.mfu) if options.gpu else None
    from recipes_lib.planning.pretraining import plan_pretraining

    plan = plan_pretraining(config, options.num_processes)
    sys.stdout.write("".join([f"{line}\n" for line in describe_run(config, plan, hardware)]))
    if options.schedule:
        _draw(options.schedule, config, plan.schedule)
        sys.stdout.write(f"{options.schedule}\n")


def describe_run(config: RecipeConfig, plan: PretrainingPlan, hardware: Hardware | None) -> Iterator[str]:
    """Yield what a run is, line by line.

    Args:
        config: The run.
        plan: From ``plan_pretraining``.
        hardware: What to tell the hours on; ``None`` to tell none.

    Raises:
        ConfigError: The model cannot be built, or the peak of the GPU is not known.
    """
    from recipes_lib.planning.compute import compute_flops_per_token, compute_model_size, compute_training_flops

    model_config = _find_model_config(config)
    size, num_tokens = compute_model_size(model_config), plan.num_tokens
    counted = compute_flops_per_token(model_config, plan.max_length).total(num_tokens, num_tokens)
    yield _label("model", f"{model_config.model_type}, {size.total:,} parameters")
    yield _label("", f"{size.non_embedding:,} without embeddings")
    if size.active != size.total:
        yield _label("", f"{size.active:,} active for a token")
    yield _label("tokens", f"{num_tokens:,}, {_judge_tokens(size, num_tokens)}")
    yield _label("operations", f"{compute_training_flops(size.active, num_tokens):.3g} by 6 x parameters x tokens")
    yield _label("", f"{counted:.3g} counted, every token attending to the {plan.max_length:,} of its row")
    yield _label("time", _tell_hours(counted, hardware, config))
    if hardware is not None and (price := config.evaluation.device_hour_price) is not None:
        device_hours = _count_hours(counted, hardware, config) * hardware.num_gpus
        yield _label("cost", f"{device_hours * price:,.2f}, at {price:g} for a device hour")
    yield from _describe_schedule(config, plan.schedule)
    if hardware is not None:
        yield ""
        yield from plan_tuning.describe_memory(config, model_config, hardware.num_gpus, hardware.gpu)


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


def _verify_no_gpus(argv: Sequence[str]) -> None:
    """Refuse a number of GPUs where each process has one."""
    if any(argument.partition("=")[0] == "--num_gpus" for argument in argv):
        found = "is a flag of pretraining, where several GPUs may share a row; here a process has a GPU"
        raise ConfigError(Problem("--num_gpus", found, "write --num_processes, the number of GPUs"))


def _find_problems(config: RecipeConfig, options: argparse.Namespace) -> Iterator[Problem]:
    if config.pretraining.max_tokens is None and config.read("max_steps") < 1:
        found = "the length of the run is in epochs, and a plan reads no data"
        yield Problem("max_tokens", found, "write `max_tokens: ...` or `max_steps: ...`")
    for flag in ("num_processes", "num_gpus"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            yield Problem(f"--{flag}", f"is {value}", "write 1 or more")
    if not 0 < options.mfu <= 1:
        yield Problem("--mfu", f"is {options.mfu}", "write a share above 0, at most 1; 0.4 is usual")


def _find_model_config(config: RecipeConfig) -> Any:
    """Return the architecture; the tokenizer is asked for nothing but a ``vocab_size`` that the recipe leaves out.

    Raises:
        ConfigError: It is wrong, or neither it nor the tokenizer says how many rows the embedding has.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from recipes_lib.models.architecture import build_model_config
    from recipes_lib.models.loading import load_model_config, load_tokenizer

    architecture = config.model.model_config
    if architecture is None:
        return load_model_config(config.model)[0]
    if "vocab_size" in architecture:
        empty: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
        return build_model_config(architecture, empty, config.tokens.max_length)
    try:
        tokenizer = load_tokenizer(config.model, config.tokens)
    except ConfigError as error:
        remedy = "write `vocab_size` in `model_config`: a plan needs nothing else of the tokenizer"
        raise ConfigError(*(Problem(problem.where, problem.found, remedy) for problem in error.problems)) from error
    return build_model_config(architecture, tokenizer, config.tokens.max_length)


def _judge_tokens(size: ModelSize, num_tokens: int) -> str:
    from recipes_lib.planning.compute import TOKENS_PER_PARAMETER

    ratio = num_tokens / size.active
    factor = ratio / TOKENS_PER_PARAMETER
    told = f"{ratio:,.1f} a parameter; the rule of Chinchilla is {TOKENS_PER_PARAMETER:.0f}: "
    return told + (f"over-trained by {factor:,.2f}" if factor >= 1 else f"under-trained by {1 / factor:,.2f}")


def _tell_hours(num_flops: float, hardware: Hardware | None, config: RecipeConfig) -> str:
    """Return the hours and how they are computed.

    Raises:
        ConfigError: The peak of the GPU is not known.
    """
    from recipes_lib.planning.compute import find_peak

    if hardware is None:
        return "name a GPU: --gpu H100 --num_processes 8 --mfu 0.4"
    hours, peak = _count_hours(num_flops, hardware, config), find_peak(hardware.gpu, config)
    formula = f"{num_flops:.3g} / ({hardware.num_gpus} GPUs x {peak:.3g} FLOP/s x {hardware.mfu:g} MFU x 3600 s)"
    return f"{hours:,.1f} hours, {hours / 24:,.1f} days, on {hardware.num_gpus:,} {hardware.gpu}: {formula}"


def _count_hours(num_flops: float, hardware: Hardware, config: RecipeConfig) -> float:
    from recipes_lib.planning.compute import compute_hours, find_peak

    return compute_hours(num_flops, hardware.num_gpus, find_peak(hardware.gpu, config), hardware.mfu)


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

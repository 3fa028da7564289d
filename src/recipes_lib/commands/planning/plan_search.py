"""``recipes plan --gpus 8xH100``: search for the fastest layout of a recipe on some GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import PreTrainedConfig

from recipes_lib.commands.planning.planned_hardware import CURVE, Hardware, Row
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import replace_text
from recipes_lib.planning.devices import find_efficiency
from recipes_lib.planning.memory import list_layouts, plan_memory
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.planning.pretraining import count_run_tokens
from recipes_lib.planning.schedule import compute_steps
from recipes_lib.planning.search import Candidate, search
from recipes_lib.shipped import find_launch_file
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import plan_launch, read_launch_file
from recipes_lib.training.layouts.memory_layout import build_layout

_SEARCHED: Final = ("ddp", "fsdp2", "hsdp", "zero2", "fsdp2_offload")
"""Launch files of several GPUs; tensor, context and pipeline parallelism are planned by name (``--hardware``)."""
_SHOWN: Final = 12


def search_plan(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    options: argparse.Namespace,
    hardware: Hardware,
    num_processes: int,
) -> list[Row]:
    """Return what ``planning.search`` finds, the best first, with hours, cost and the keys to set.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        options: Flags of the command.
        hardware: The GPUs.
        num_processes: For which the recipe's batch is written.

    Raises:
        ConfigError: Nothing fits, with the nearest change that would; the batch does not divide; the run takes longer
            or costs more than it may, or neither is known.
    """
    number, device = hardware.num_gpus, hardware.device
    batch = config.read("per_device_train_batch_size") * config.read("gradient_accumulation_steps") * num_processes
    layouts = _list_searched(config, number)
    found = search(config, model_config, layouts, batch, device, hardware.peak, hardware.measured)
    if not found:
        told = f"{batch} rows of an optimizer step cannot be divided by {number} processes"
        raise ConfigError(Problem("--gpus", told, "name a number that divides them"))
    best = found[0]
    if not best.fits:
        least = min(one.memory.peak for one in found)
        told = f"the run fits {options.gpus} in no layout: {least / 1e9:.1f} GB at least, of {device.memory / 1e9:g} GB"
        raise ConfigError(Problem("--gpus", told, _find_change(config, model_config, hardware)))
    steps = _count_steps(config, options.num_rows, batch, num_processes)
    hours = best.seconds * steps / 3600
    _verify_limits(options, hours, hours * number * hardware.price if hardware.price is not None else math.nan)
    if options.write:
        _write(options.write, best, number)
    heads = (
        f"{'layout':14}{'rows x accumulated':>19}  {'recomputed':16}{'compiled':>8}{'GB':>8}{'s a step':>10}  verdict"
    )
    chosen = dataclasses.replace(config, training={**config.training, **best.keys})
    share, source = find_efficiency(chosen, hardware.measured)
    rows = [
        *dataclasses.replace(hardware, mfu=share, source=source).describe(),
        ("batch", f"{batch:,} rows an optimizer step, as the recipe has it"),
        (CURVE, ""),
    ]
    rows += [(CURVE, heads), *((CURVE, _describe(one, best, device.memory)) for one in _thin(found)), (CURVE, "")]
    rows.append(("keys", " ".join(f"--{key} {json.dumps(value)}" for key, value in best.keys.items())))
    rows.append(("launch file", f"accelerate_configs/{best.layout.launch_file}.yaml --num_processes {number}"))
    if steps:
        rows += [("time", f"{hours:,.1f} hours for {steps:,} steps"), *hardware.describe_bill(hours)]
    return rows


def _list_searched(config: RecipeConfig, number: int) -> list[Layout]:
    """Return the layouts that this recipe supports on so many GPUs.

    Raises:
        ConfigError: There is none; with what is in the way of the first.
    """
    layouts, refused = list[Layout](), list[ConfigError]()
    for name in _SEARCHED if number > 1 else ("single_gpu",):
        launch = plan_launch(find_launch_file(name), number)
        try:
            verify_combination(config, launch, name)
        except ConfigError as error:
            refused.append(error)
        else:
            if math.prod(launch.layout.sizes.values()) in (1, number):
                layouts.append(build_layout(launch, name, 1))
    if not layouts:
        raise refused[0]
    return layouts


def _count_steps(config: RecipeConfig, num_rows: int | None, batch: int, num_processes: int) -> int:
    """Return the optimizer steps of the run, which do not depend on the layout; 0 if unknown."""
    if config.recipe == "pretrain":
        num_tokens, length = count_run_tokens(config, num_processes), config.tokens.max_length
        return round(num_tokens / (batch * length)) if num_tokens and length else 0
    return compute_steps(num_rows, config.training, num_processes).num_steps


def _verify_limits(options: argparse.Namespace, hours: float, cost: float) -> None:
    for flag, limit, value in (("deadline", options.deadline, hours), ("budget", options.budget, cost)):
        if limit is not None and (not value or math.isnan(value)):
            found = "needs the length of the run" if not hours else "needs a price"
            remedy = "write --num_rows, max_steps or max_tokens" if not hours else "write --price_per_gpu_hour"
            raise ConfigError(Problem(f"--{flag}", found, remedy))
        if limit is not None and value > limit:
            found = f"the fastest plan that fits takes {value:,.1f}, more than {limit:,g}"
            remedy = (
                "raise it, shorten the run, or name more GPUs" if flag == "deadline" else "raise it, or shorten the run"
            )
            raise ConfigError(Problem(f"--{flag}", found, remedy))


def _thin(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each layout and kind of checkpointing."""
    kinds: dict[tuple[str, str], Candidate] = {}
    for one in found:
        kinds.setdefault((one.layout.launch_file, one.mode), one)
    return list(kinds.values())[:_SHOWN]


def _describe(one: Candidate, best: Candidate, memory: float) -> str:
    rows = f"{one.keys['per_device_train_batch_size']} x {one.keys['gradient_accumulation_steps']}"
    ratio = one.seconds / best.seconds
    verdict = f"{ratio:.2f} times as long" if ratio >= 1.005 else "as fast, and its micro-batch no larger"
    if one is best:
        verdict = "the fastest that fits"
    if not one.fits:
        verdict = f"does not fit {memory / 1e9:g} GB"
    compiled = "yes" if one.keys["torch_compile"] else "no"
    held = f"{one.memory.peak / 1e9:8.1f}{one.seconds:10.3g}"
    return f"{one.layout.launch_file:14}{rows:>19}  {one.mode:16}{compiled:>8}{held}  {verdict}"


def _find_change(config: RecipeConfig, model_config: PreTrainedConfig, hardware: Hardware) -> str:
    """Return the smallest change with which the run would fit: shorter rows, an adapter, or more GPUs."""
    keys: dict[str, Any] = {"per_device_train_batch_size": 1, "activation_checkpointing": True}
    least = dataclasses.replace(config, training={**config.training, **keys, "activation_checkpointing_kwargs": None})
    number, length = hardware.num_gpus, config.tokens.max_length or 0
    tried = [
        (
            f"max_length: {part} would",
            dataclasses.replace(least, tokens=dataclasses.replace(config.tokens, max_length=part)),
            number,
        )
        for part in (length // 2, length // 4)
    ]
    if config.recipe in ("sft", "dpo", "reward") and not config.adapter.use_peft:
        adapter = dataclasses.replace(config.adapter, use_peft=True)
        tried.append(
            (
                "an adapter would (`use_peft: true`, or recipes/lora.py)",
                dataclasses.replace(least, adapter=adapter),
                number,
            )
        )
    tried += [(f"{number * factor} of these GPUs would", least, number * factor) for factor in (2, 4, 8, 16)]
    for told, changed, count in tried:
        if any(
            plan_memory(changed, model_config, layout).fits(hardware.device.memory)
            for layout in list_layouts(changed, count)
        ):
            return told
    return "name GPUs with more memory"


def _write(folder: Path, best: Candidate, number: int) -> None:
    """Write the launch file and the keys of a candidate."""
    document = read_launch_file(find_launch_file(best.layout.launch_file)) | {"num_processes": number}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("accelerate.yaml", document), ("keys.yaml", dict(best.keys))):
        replace_text(folder / name, yaml.safe_dump(content, sort_keys=False))

"""``recipes plan`` of a run of PPO: the memory of its models by layout and phase; no data, weights or GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

_USUAL_GB: Final = (24, 48, 80, 141, 192)


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The configuration or a flag is wrong, or the model's configuration cannot be had.
    """
    parser = argparse.ArgumentParser(prog="recipes plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stage", choices=["ppo"], help="recipe to plan (default: what the file's name begins with)")
    parser.add_argument("--config", metavar="F", help="the recipe; further --key value flags override it")
    parser.add_argument("--num_processes", type=int, default=1, help="processes of the run (default: 1)")
    parser.add_argument("--gpu", help="GPU that has to hold it, such as H100")
    options, overrides = parser.parse_known_args(argv)
    config = load_for_command("ppo", overrides, options.config)
    sys.stdout.write("".join(f"{line}\n" for line in describe_run(config, options.num_processes, options.gpu)))


def describe_run(config: RecipeConfig, num_processes: int, gpu: str | None) -> Iterator[str]:
    """Yield what a run holds in memory, line by line, and which devices and launch file hold it.

    Args:
        config: The run.
        num_processes: Its processes.
        gpu: Name of the device; ``None`` for those that are usual.

    Raises:
        ConfigError: The model's configuration cannot be had, or the GPU or the number of processes makes no sense.
    """
    from recipes_lib.models.loading import load_model_config
    from recipes_lib.planning.compute import device_memory
    from recipes_lib.rl.memory import count_memory

    if num_processes < 1:
        raise ConfigError(Problem("--num_processes", f"is {num_processes}", "write 1 or more"))
    sizes = {f"{size} GB": size * 1e9 for size in _USUAL_GB}
    if gpu is not None:
        if (size := device_memory(gpu)) is None:
            found = f"the memory of {gpu!r} is not known"
            raise ConfigError(Problem("--gpu", found, "write a name as `nvidia-smi -L` has it, or a size such as 80GB"))
        sizes = {gpu: size}
    model_config, _ = load_model_config(config.model)
    counted = count_memory(config, model_config, is_half=config.training.get("bf16") is not False)
    layouts = {1: "accelerate_configs/ddp.yaml: a copy of everything on each process"}
    if num_processes > 1 and not config.adapter.use_peft:
        layouts[num_processes] = f"accelerate_configs/fsdp2.yaml: shared by {num_processes} processes"
    for num_shards, how in layouts.items():
        plan = counted.plan(num_shards)
        yield how
        yield from (f"    {line}" for line in plan.describe())
        fitting = [name for name, size in sizes.items() if plan.fits(size)]
        told = f"fits {', '.join(fitting)}" if fitting else f"does not fit {', '.join(sizes)}"
        yield f"    {plan.peak / 1e9:.1f} GB at most: {told}"

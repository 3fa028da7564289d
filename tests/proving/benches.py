"""Benches for tests: recipes in forked processes, or fakes with given losses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tests.distributed.sharding import run_recipe
from tests.forked import Launch, run_forked
from tests.rows import write_rows

from recipes_lib.proving.bench import Bench, Launcher

CPU = torch.device("cpu")
GPU = torch.device("cuda")
FAST = ("environment", "attention", "loss-head", "layers", "checkpoint", "gpus")


def launch_forked(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
    if arguments[0] == "-m":
        output.write_text(run_forked(*arguments[1:], variables=variables, num_processes=None))
        return 0
    ended = Launch(__name__, *arguments).finish()
    output.write_text(ended.stdout + ended.stderr)
    return ended.returncode


def build_bench(folder: Path, launcher: Launcher = launch_forked, device: torch.device = CPU) -> Bench:
    return Bench(folder, device, is_small=True, launch=launcher, num_gpus=int(device == GPU))


def read_flags(arguments: Sequence[str]) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=", 1) for flag in arguments if "=" in flag)


def write_losses(cpu_loss: float, device_loss: float) -> Launcher:
    """Return a launcher that records these losses instead of running a recipe."""

    def record(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        flags = read_flags(arguments)
        loss = cpu_loss if flags["output_dir"].endswith("cpu") else device_loss
        event = {"kind": "train", "loss": loss, "tokens_per_second": 1.0, "memory_bytes": 1}
        write_rows(Path(flags["output_dir"]) / "metrics.jsonl", [{**event, "step": step} for step in (1, 2)])
        return 0

    return record


if __name__ == "__main__":
    # Run a recipe without charts and a measured peak.
    sys.exit(run_recipe(Path(sys.argv[1]).stem, read_flags(sys.argv[2:])))

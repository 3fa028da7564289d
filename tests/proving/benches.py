"""Benches of tests: recipes in forked processes, or stand-ins with losses of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tests.forked import run_forked, run_script

from recipes_lib.proving.bench import Bench, Launcher

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GPU = torch.device("cuda")
FAST = ("environment", "attention", "loss-head", "layers", "checkpoint", "gpus")


def launch_forked(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
    if arguments[0] == "-m":
        output.write_text(run_forked(*arguments[1:], variables=variables, num_processes=None))
        return 0
    ended = run_script(ROOT / arguments[0], *arguments[1:])
    output.write_text(ended.stdout + ended.stderr)
    return ended.returncode


def build_bench(folder: Path, launcher: Launcher = launch_forked, device: torch.device = CPU) -> Bench:
    return Bench(folder, device, is_small=True, launch=launcher, num_gpus=int(device == GPU))


def write_losses(of_cpu: float, of_device: float) -> Launcher:
    """Stands for a recipe that has these losses."""

    def record(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in arguments[1:])
        loss = of_cpu if flags["output_dir"].endswith("cpu") else of_device
        event = {"kind": "train", "step": 1, "loss": loss}
        (Path(flags["output_dir"]) / "metrics.jsonl").write_text(json.dumps(event) + "\n")
        return 0

    return record

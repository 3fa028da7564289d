"""Saves a small sharded model on two ranks, with a fault on one of them: ``FOLDER FAULT``."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tests.training.configurations import build_recipe
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.training.checkpoints import manifest
from recipes_lib.training.checkpoints import sharded as sharded_states
from recipes_lib.training.checkpoints.manifest import find_last_complete
from recipes_lib.training.checkpoints.resume import agree_on_checkpoint
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, Task
from recipes_lib.training.checkpoints.sharded import (
    Trained,
    copy_model_shards,
    copy_optimizer_shards,
    read_trained_state,
    verify_shards,
)
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import Run

MOMENTS = {
    "flush": (manifest, "fsync", 1),
    "hash": (manifest, "hash_file", 1),
    "seal": (manifest, "write_complete", 0),
    "name": (manifest, "publish", 0),
}
"""Moment of a save -> (module, function, rank that is killed before the call)."""


def kill_at(moment: str) -> None:
    """Kill one rank before this moment of the second save."""
    owner, name, rank = MOMENTS[moment]
    original = getattr(owner, name)

    def die(path: Path, *args: Any, **kwargs: Any) -> Any:
        if "checkpoint-2" in str(path) and distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *args, **kwargs)

    setattr(owner, name, die)


def spoil(folder: Path, fault: str) -> None:
    """Corrupt the shard of rank 1."""
    (file,) = (folder / "model_shards").glob("shard-00002-*")
    content = bytearray(file.read_bytes())
    # The last number becomes NaN; or the file is truncated.
    content[-4:] = torch.tensor(float("nan")).numpy().tobytes()
    file.write_bytes(content if fault == "nan" else content[:-8])


def pretend_to_see_more() -> None:
    """Let this rank report a file that the other does not see, as on a disk that is not shared."""
    flush = manifest.flush_files
    unseen = {"rng_state_3.pth": {"size": 1, "sha256": ""}}
    manifest.flush_files = lambda *args: {**flush(*args), **unseen}


class LoggedFile:
    """A safetensors file that prints which rank reads a tensor."""

    def __init__(self, file: Path, **options: Any) -> None:
        self._file, self._opened = file, safe_open(file, **options)

    def __enter__(self) -> Any:
        opened = self._opened.__enter__()
        self.keys, self.get_slice = opened.keys, opened.get_slice
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        sys.stdout.write(f"process {distributed.get_rank()} reads {self._file.name}\n")
        tensor: torch.Tensor = self._opened.get_tensor(name)
        return tensor


def build() -> tuple[Any, torch.optim.Optimizer]:
    """Build a sharded model, and an optimizer after one step."""
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


def wait_for(event: threading.Event) -> None:
    """Wait until the training loop has changed a weight, before any shard is written."""
    assert event.wait(60), "training waits for the save"


def copy_shards(folder: Path, model: Any, optimizer: torch.optim.Optimizer, saver: CheckpointSaver) -> list[Task]:
    """Copy the shards of model and optimizer, and return the tasks that write them."""
    saver.decide_to_copy((read_trained_state(model), dict(optimizer.state)))
    trained = Trained(dict(model.named_parameters()), optimizer)
    return [copy_model_shards(folder, read_trained_state(model), saver), copy_optimizer_shards(folder, trained, saver)]


def choose(output_dir: Path) -> None:
    """Print the checkpoint that each rank resumes from."""
    checkpoint = agree_on_checkpoint(find_last_complete(output_dir), read_launch(), {}, print)
    sys.stdout.write(f"process {distributed.get_rank()} chooses {checkpoint and checkpoint.name}\n")


def start(output_dir: Path, how: str) -> None:
    """Start a run, on a disk of its own (``apart``), with shards, or ``unsaved``; print its error."""
    launch = dataclasses.replace(read_launch(), engine="FSDP" if "shards" in how else "")
    output_dir /= str(launch.rank) if "apart" in how else ""
    output_dir.mkdir(exist_ok=True)
    config = build_recipe({"output_dir": str(output_dir)} | ({"save_strategy": "no"} if "unsaved" in how else {}))
    try:
        Run(config, output_dir, launch, None, finished=False).choose_checkpoint()
    except ConfigError as error:
        sys.stdout.write(f"process {launch.rank} ended: {error}\n")


def main() -> None:
    """Save two checkpoints, the second with the fault, and print errors; or ``choose`` one, or ``start`` a run."""
    output_dir, fault = Path(sys.argv[1]), sys.argv[2]
    args = TrainingArguments(output_dir=str(output_dir), use_cpu=True, report_to="none")
    if fault == "choose":
        choose(output_dir)
        return
    if fault.endswith(("together", "apart")):
        start(output_dir, fault)
        return
    model, optimizer = build()
    sharded_states.safe_open = LoggedFile
    saver, shapes = (
        CheckpointSaver(args, print, engine="FSDP"),
        {name: tensor.shape for name, tensor in read_trained_state(model).items()},
    )
    if fault in MOMENTS:
        kill_at(fault)
    for step in (1, 2):
        folder, continued = saver.open(step), threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rng_state_{args.process_index}.pth").write_bytes(bytes(100))
        distributed.barrier()
        tasks = [partial(wait_for, continued), *copy_shards(folder, model, optimizer, saver)]
        if step == 2 and args.process_index == 1:
            if fault in ("nan", "short"):
                tasks.append(partial(spoil, folder, fault))
            if fault == "unseen":
                pretend_to_see_more()
        try:
            saver.save(Staged(folder, step, tasks, partial(verify_shards, folder, shapes)))
            with torch.no_grad():
                model[0].weight.add_(1)
            continued.set()
            saver.finish()
        except Exception as error:
            sys.stdout.write(f"process {args.process_index} ended: {error}\n")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

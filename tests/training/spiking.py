"""Runs on packed rows, some of which cause a loss spike."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tests.distributed.sharding import take_cpus_for_gpus
from tests.training.trajectories import Recorder, make_trainer
from torch import distributed
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.errors import DivergedError
from recipes_lib.training.guards.replay_check import compute_checksums
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer

MAX_ROW = 8
"""Number of token ids of ordinary rows; rows with other ids cause a spike."""


def make_spiking_packs(num_rows: int, bad: Collection[int] = ()) -> Dataset:
    """Return packed rows of few token ids; ``bad`` rows have ids that no other row has."""
    generator = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_lengths": [], "row_ids": []}
    for row in range(num_rows):
        length = int(generator.integers(12, 20))
        low, high = (300, 500) if row in bad else (4, 4 + MAX_ROW)
        rows["input_ids"].append(generator.integers(low, high, size=length))
        rows["loss_mask"].append(np.ones(length, bool))
        rows["seq_lengths"].append([length])
        rows["row_ids"].append([row])
    return Dataset.from_dict(rows).with_format("numpy")


def make_guarded(
    model_dir: Path, output_dir: Path, packs: Dataset, *, guards: GuardsConfig, **keys: Any
) -> tuple[SFTTrainer, Recorder]:
    """Return a trainer that saves every five steps and has learned the ordinary ids before the bad rows."""
    defaults = {
        "learning_rate": 3e-3,
        "max_steps": 31,
        "save_strategy": "steps",
        "save_steps": 5,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    trainer, recorder = make_trainer(model_dir, output_dir, packs, **(defaults | keys))
    trainer.observer = replace(trainer.observer, guards=guards)
    trainer.guard._keys = guards
    trainer.guard._replay._every = guards.verify_steps
    return trainer, recorder


def train_on_rows(model_dir: Path, output_dir: Path, packs: Dataset, rows: Sequence[int], **keys: Any) -> Any:
    """Train on these rows in order, without spike detection."""
    trainer, recorder = make_guarded(model_dir, output_dir, packs.select(rows), guards=GuardsConfig(), **keys)
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    trainer.train()
    return trainer, recorder


class PlantedSpikes:
    """Replacement of ``SpikeMonitor.find_spike``: a spike at the first of some steps, after a rollback at the next."""

    def __init__(self, trainer: Any, *steps: int) -> None:
        self._trainer = trainer
        self._steps = steps

    def __call__(self, loss: float, grad_norm: float, kind: str) -> str | None:
        due = self._steps[len(self._trainer.guard.rollbacks) :][:1]
        return f"loss {loss}" if due == (self._trainer.state.global_step + 1,) else None


def run_cell(model_dir: Path, output_dir: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """Train with the keys of ``cell`` in this rank; return its error, metrics and checksums."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    keys = dict(cell)
    fault, rows, guards = keys.pop("fault", None), keys.pop("rows", None), GuardsConfig(**keys.pop("guards", {}))
    planted = keys.pop("planted", None)
    packs = make_spiking_packs(180, range(104, 108))
    if rows is not None:
        packs = packs.select(rows)
    trainer, recorder = make_guarded(model_dir, output_dir, packs, guards=guards, **keys)
    if planted is not None:
        trainer.guard._monitor.find_spike = PlantedSpikes(trainer, planted)
    if fault is not None and rank == 1:
        trainer.callback_handler.callbacks.insert(0, Fault(trainer, fault))
    end = ""
    try:
        trainer.train()
    except DivergedError as error:
        end = str(error)
    return {"end": end, "steps": recorder.steps, "checksums": compute_checksums(trainer.model.state_dict())}


class Fault(TrainerCallback):
    """Injects a fault into this rank at the beginning of step 4."""

    def __init__(self, trainer: Any, kind: str) -> None:
        self._trainer = trainer
        self._kind = kind

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Inject the fault before the guard's checks."""
        if state.global_step != 3:
            return
        model = self._trainer.model
        if self._kind == "nan loss":
            compute = self._trainer.compute_loss
            self._trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) + float("nan")
        elif self._kind == "flipped bit":
            words = model.model.layers[1].mlp.up_proj.weight.data.view(torch.int32)
            words[3, 5] ^= 1
        elif self._kind == "nan gradient":
            model.model.layers[0].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * float("nan"),))
        elif self._kind == "wrong product":
            model.model.layers[0].mlp.down_proj.register_forward_hook(WrongProduct())
        elif self._kind == "wrong gradients":
            # Of every pass another one; those that are reduced over the ranks are wrong on both.
            numbers = itertools.count(1)
            model.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * next(numbers))


class WrongProduct:
    """Forward hook that changes one element of the second output."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls != 2:
            return output
        changed = output.clone()
        changed[0, 3, 5] += 1.0
        return changed


def main() -> None:
    """Run the cells in this rank, in turn: ``MODEL OUTPUT JSON_CELLS``."""
    model_dir, output_dir, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if read_launch().engine:
        take_cpus_for_gpus()
    reports = {name: run_cell(model_dir, output_dir / name, cell) for name, cell in cells.items()}
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, reports)
    if distributed.get_rank() == 0:
        (output_dir / "reports.json").write_text(json.dumps(gathered))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Runs over packs of which some make the loss jump, and what is left of such a run."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import SequentialSampler
from tests.training.trajectories import Recorder, make_trainer

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.training.sft import SFTTrainer

MAX_ROW = 8
"""Ids of ordinary rows are below 4 plus this, so that others come as a surprise."""


def make_spiking_packs(num_rows: int, bad: Collection[int] = ()) -> Dataset:
    """Packs of a few ids; the bad ones of ids that never occur elsewhere."""
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
    """A trainer that saves every five steps and has learnt the common ids when the bad rows come."""
    defaults = {
        "learning_rate": 3e-3,
        "max_steps": 36,
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
    """Train on these rows one after the other, without any guard of spikes: upstream's loop and nothing else."""
    trainer, recorder = make_guarded(model_dir, output_dir, packs.select(rows), guards=GuardsConfig(), **keys)
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    trainer.train()
    return trainer, recorder


def read_events(output_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind in ``metrics.jsonl``."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]

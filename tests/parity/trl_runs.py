"""Trainings by TRL's trainers, and the keys that they share with ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from tests.training.trajectories import Recorder
from transformers import AutoTokenizer

from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.prepared_set import prepare

SHARED: dict[str, Any] = {
    "seed": 3,
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
}
"""Of every run; schedule and batch size are of each test."""
PAIRS: dict[str, Any] = SHARED | {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "max_steps": 10,
    "train_sampling_strategy": "sequential",
    "max_grad_norm": 0.7,
}
"""Of runs on pairs."""


def prepare_rows(recipe: str, model_dir: Path, rows: Path, folder: Path, shared: dict[str, Any]) -> Any:
    """Return the configuration of a recipe without packing, and its prepared rows."""
    keys = shared | {
        "model_name_or_path": model_dir,
        "dataset_name": rows,
        "output_dir": folder / "ours",
        "prepared_dir": folder / "prepared",
        "packing": False,
    }
    config = load_config(recipe, [f"--{name}={value}" for name, value in keys.items()])
    return config, prepare(config, lambda: AutoTokenizer.from_pretrained(model_dir)).train


def train_trl(trainer: Any, arguments: Any, model: Any, model_dir: Path, rows: Path | Dataset, folder: Path) -> Any:
    """Train with a trainer of TRL.

    Args:
        trainer: Class of the trainer.
        arguments: Class of its arguments, with all of them but the output directory.
        model: Model, or its folder as text.
        model_dir: Folder of the tokenizer.
        rows: Training data, or their JSON Lines file.
        folder: Folder of the output directory and of the cache.

    Returns:
        Loss and gradient norm of each step.
    """
    if isinstance(rows, Path):
        rows = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    recorder = Recorder()
    trainer(
        model,
        args=arguments(output_dir=str(folder / "trl"), report_to="none", disable_tqdm=True),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        callbacks=[recorder],
    ).train()
    return recorder.steps


def assert_same_steps(expected: list[dict[str, float]], got: list[dict[str, float]], rel: float = 1e-5) -> None:
    """Assert that losses and gradient norms of each step are equal."""
    for step, (one, other) in enumerate(zip(expected, got, strict=True), 1):
        assert other == pytest.approx(one, rel=rel, abs=1e-7), f"step {step}"


def copy_with_template(model_dir: Path, folder: Path, template: str) -> Path:
    """Copy a model, with another chat template."""
    shutil.copytree(model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder

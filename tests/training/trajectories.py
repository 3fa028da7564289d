"""Packed rows of unequal length, and short training runs, for tests that compare trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tests.training.configurations import build_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from recipes_lib.config.schema import CheckpointConfig, ModelConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.training.forgetting.weight_penalty import WeightPenalty
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import EvaluationHook, Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.next_token_trainer import BaseDivergence, SFTTrainer

KEYS: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "activation_checkpointing": False,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "max_steps": 4,
    "lr_scheduler_type": "linear",
}
FIGURES = ("loss", "grad_norm", "learning_rate")


def make_packs(num_rows: int = 16, *, seed: int = 0) -> Dataset:
    """Return packed rows with very unequal numbers of documents, tokens and targets."""
    generator = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_lengths": [], "row_ids": []}
    for row in range(num_rows):
        lengths = generator.integers(3, 20, size=generator.integers(1, 4))
        total = int(lengths.sum())
        rows["input_ids"].append(generator.integers(4, 512, size=total))
        rows["loss_mask"].append(generator.random(total) < generator.uniform(0.1, 0.9))
        rows["seq_lengths"].append(lengths)
        rows["row_ids"].append([row] * len(lengths))
    return Dataset.from_dict(rows).with_format("numpy")


class Recorder(TrainerCallback):
    """Records all logged metrics, and progress lines."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    @property
    def train_logs(self) -> list[dict[str, Any]]:
        """Logs of training steps, without those of evaluations and the end."""
        return [logs for logs in self.logs if "loss" in logs]

    @property
    def steps(self) -> list[dict[str, float]]:
        """Loss, gradient norm and learning rate of each training step."""
        return [{name: float(logs[name]) for name in FIGURES} for logs in self.train_logs]


class Narrator(TrainingProgress):
    """Progress that appends its lines to a list."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def say(self, line: str) -> None:
        self._lines.append(line)


def make_trainer(
    model_dir: Path,
    output_dir: Path,
    packs: Dataset,
    *,
    hooks: Sequence[EvaluationHook] = (),
    checkpoints: CheckpointConfig | None = None,
    penalty: WeightPenalty | None = None,
    base: BaseDivergence | None = None,
    **training: Any,
) -> tuple[SFTTrainer, Recorder]:
    """Return a trainer in float32 that logs every step, and its recorder."""
    config = build_recipe(
        {**KEYS, "output_dir": str(output_dir), **training},
        model=ModelConfig(model_name_or_path=str(model_dir)),
        checkpoints=checkpoints or CheckpointConfig(),
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    recorder = Recorder()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa"),
        args=build_training_arguments(config, read_launch(), has_eval=bool(hooks)),
        train_dataset=packs,
        eval_dataset=packs if hooks else None,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        penalty=penalty,
        base=base,
        observer=Observer(StepCounter(), list(hooks), [recorder], Narrator(recorder.lines)),
    )
    return trainer, recorder


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the model's ``state_dict``."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two state dicts are bit-identical."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

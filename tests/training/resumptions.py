"""Runs of three recipes that resume on another world size, and the rows of each step."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tests.recipes.preferences import load_recipe
from tests.rows import read_events
from tests.training import pairs, pretraining, trajectories
from tests.training.configurations import build_recipe
from torch import distributed

from recipes_lib.config.schema import ModelConfig
from recipes_lib.training.guards.start_checks import StartChecks
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import start_run
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer

KEYS: dict[str, Any] = {
    "max_steps": 7,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 5,
    "per_device_train_batch_size": 2,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "learning_rate": 1e-3,
}


class RecordingCollator:
    """Collator that records the rows of each batch."""

    def __init__(self, collate: Any, batches: list[list[int]]) -> None:
        self._collate, self._batches = collate, batches

    def __call__(self, rows: Any) -> Any:
        ids = [row["chosen_ids"] if "chosen_ids" in row else row["input_ids"] for row in rows]
        self._batches.append([zlib.crc32(np.asarray(row, np.int64).tobytes()) for row in ids])
        return self._collate(rows)


def run(recipe: str, folder: Path, model_dir: Path, tokenizer_dir: Path, accumulation: int) -> dict[str, Any]:
    """Run or resume a recipe in ``folder``; return its losses by step and this rank's rows by batch."""
    keys = KEYS | {"output_dir": str(folder), "gradient_accumulation_steps": accumulation}
    if recipe == "pretrain":
        return _run_recipe(folder, tokenizer_dir, keys)
    config = build_recipe(keys, recipe, model=ModelConfig(model_name_or_path=str(model_dir)))
    started = start_run(config, read_launch())
    training = {name: value for name, value in started.config.training.items() if name != "output_dir"}
    # Thirty-two rows are four steps, so that the run continues in a second epoch.
    if recipe == "sft":
        trainer, recorder = trajectories.make_trainer(model_dir, folder, trajectories.make_packs(32), **training)
    else:
        trainer, recorder = pairs.make_pair_trainer(model_dir, folder, pairs.make_pairs(32), **training)
    return _train(trainer, recorder, started, training)


def _train(trainer: Any, recorder: Any, started: Any, training: dict[str, Any]) -> dict[str, Any]:
    batches: list[list[int]] = []
    # Its checks collate rows too, which are in no step.
    trainer.remove_callback(StartChecks)
    trainer.data_collator = RecordingCollator(trainer.data_collator, batches)
    checkpoint = started.choose_checkpoint()
    trainer.train(resume_from_checkpoint=checkpoint)
    first = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    losses = {str(first + number + 1): step["loss"] for number, step in enumerate(recorder.steps)}
    return {"losses": losses, "batches": batches, "accumulation": training["gradient_accumulation_steps"]}


def _run_recipe(folder: Path, tokenizer_dir: Path, keys: dict[str, Any]) -> dict[str, Any]:
    recipe: Any = load_recipe("pretrain")
    batches: list[list[int]] = []
    accumulations = []

    class RecordingTrainer(PretrainTrainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs | {"data_collator": RecordingCollator(kwargs["data_collator"], batches)})
            self.remove_callback(StartChecks)
            accumulations.append(self.args.gradient_accumulation_steps)

    recipe.choose_trainer = lambda _: RecordingTrainer
    with mock.patch("recipes_lib.publish.final_model.finish_run"):
        recipe.main(pretraining.build_config(folder.parent.parent, tokenizer_dir, **keys))
    losses = {str(event["step"]): event["loss"] for event in read_events(folder)}
    return {"losses": losses, "batches": batches, "accumulation": accumulations[0]}


def cut(source: Path, target: Path, step: int, damaged: int) -> None:
    """Copy a finished run as if killed after ``step``, with a later checkpoint ``damaged`` by a flipped bit."""
    target.mkdir(parents=True)
    for number in (step, damaged):
        shutil.copytree(source / f"checkpoint-{number}", target / f"checkpoint-{number}")
    states = target / f"checkpoint-{damaged}" / "optimizer.pt"
    data = bytearray(states.read_bytes())
    data[len(data) // 2] ^= 1
    states.write_bytes(data)
    record = json.loads((source / "run.json").read_text())
    record["config"]["output_dir"] = str(target)
    (target / "run.json").write_text(json.dumps(record | {"status": "running"}))


def main() -> None:
    """Run in this rank: ``MODEL TOKENIZER OUTPUT JSON_OF_[RECIPE, FOLDER, ACCUMULATION]``."""
    model_dir, tokenizer_dir, output_dir = map(Path, sys.argv[1:4])
    reports = [
        run(recipe, output_dir / folder, model_dir, tokenizer_dir, accumulation)
        for recipe, folder, accumulation in json.loads(sys.argv[4])
    ]
    (output_dir / f"reports-{distributed.get_rank()}.json").write_text(json.dumps(reports))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Small pretraining runs with the recipe, optionally interrupted after a given step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.recipes.preferences import load_recipe
from tests.tiny import sizes
from transformers import TrainerCallback

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "rivers", "carry", "sand", "towards", "sea", "every", "day")


def write_documents(path: Path, num_documents: int = 40) -> Path:
    """Write documents of unequal lengths, some of a few words, one longer than several rows."""
    lines = []
    for number in range(num_documents):
        length = 3 + (number * 37) % 50 if number != 5 else 400
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(length)]
        lines.append(json.dumps({"text": f"{number}: " + " ".join(words)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_config(tmp_path: Path, tokenizer_dir: Path, **keys: Any) -> RecipeConfig:
    """Return a run of a random two-layer Llama on ``write_documents``, in float32, that logs every step."""
    documents = tmp_path / "documents.jsonl"
    if not documents.exists():
        write_documents(documents)
    defaults = {
        "model_config": sizes(32, 2, 4, model_type="llama"),
        "tokenizer_name_or_path": tokenizer_dir,
        "dataset_name": documents,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "max_length": 32,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "num_sample_prompts": 0,
        "save_strategy": "no",
    }
    given = {name: value for name, value in (defaults | keys).items() if value is not None}
    return load_config("pretrain", [f"--{name}={_spell(value)}" for name, value in given.items()])


def run_recipe(config: RecipeConfig, monkeypatch: pytest.MonkeyPatch, *, stop_after: int | None = None) -> None:
    """Run ``recipes/pretrain.py`` in this process, without its report; ``stop_after`` interrupts it after that step."""
    recipe = load_recipe("pretrain")

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == stop_after:
                raise KeyboardInterrupt

    class Stopping(PretrainTrainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.add_callback(Stop())

    monkeypatch.setattr(recipe, "choose_trainer", lambda _: Stopping)
    # Charts take most of the time of so short a run.
    monkeypatch.setattr("recipes_lib.publish.final_model.build_report", Mock())
    if stop_after is None:
        recipe.main(config)
        return
    with pytest.raises(KeyboardInterrupt):
        recipe.main(config)


def _spell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)

"""Recipe scripts run in this process, and a dataset of preference pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forked import ROOT

from recipes_lib.boundary import run_command
from recipes_lib.config.loader import load_config

RECIPE = ROOT / "recipes" / "dpo.py"


def load_recipe(recipe: str = "dpo") -> ModuleType:
    """Return the script of a recipe as a module."""
    spec = importlib.util.spec_from_file_location(
        f"{recipe}_recipe", RECIPE.with_stem({"rloo": "grpo", "lora": "sft"}.get(recipe, recipe))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_rows(num_rows: int = 12) -> list[dict[str, Any]]:
    """Make pairs in several writing systems; either answer may be the longer one."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {n} times {n + 3}? Größe, 漢字 🙂 " * (1 + n % 3)}],
            "chosen": [{"role": "assistant", "content": f"It is {n * (n + 3)}, ja. " * (1 + n % 4)}],
            "rejected": [{"role": "assistant", "content": "Who knows? " * (1 + (n + 2) % 3) + str(n)}],
        }
        for n in range(num_rows)
    ]


def write_config(folder: Path, model_dir: Path, data: Path, *, output: str = "a run", **keys: Any) -> Path:
    """Write the configuration of a short fp32 run without samples and checkpoints."""
    keys = {
        "model_name_or_path": str(model_dir),
        "dataset_name": str(data),
        "output_dir": str(folder / output),
        "prepared_dir": str(folder / "prepared sets"),
        "bf16": False,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_sample_prompts": 0,
        "save_strategy": "no",
    } | keys
    path = folder / "dpo.yaml"
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in keys.items()), encoding="utf-8")
    return path


def run_here(script: ModuleType, config: Path, *flags: str, recipe: str = "dpo") -> int:
    """Run a recipe in this process and return its exit code."""
    return run_command(lambda: script.main(load_config(recipe, ["--config", str(config), *flags])))


def read_record(output_dir: Path) -> dict[str, Any]:
    """Return ``run.json`` of a run."""
    record: dict[str, Any] = json.loads((output_dir / "run.json").read_text())
    return record

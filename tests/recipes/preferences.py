"""The recipe of preference training on a file of pairs, in this process and without the report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes_lib.boundary import run_command
from recipes_lib.config.loader import load_config

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "dpo.py"


def load_recipe(stage: str = "dpo") -> ModuleType:
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location(f"{stage}_recipe", RECIPE.with_stem(stage))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_rows(num_rows: int = 12) -> list[dict[str, Any]]:
    """Chats of which either answer may be the longer, in more than one script."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {n} times {n + 3}? Größe, 漢字 🙂 " * (1 + n % 3)}],
            "chosen": [{"role": "assistant", "content": f"It is {n * (n + 3)}, ja. " * (1 + n % 4)}],
            "rejected": [{"role": "assistant", "content": "Who knows? " * (1 + (n + 2) % 3) + str(n)}],
        }
        for n in range(num_rows)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]] | str) -> Path:
    """Write a row a line, or the text as it is."""
    text = rows if isinstance(rows, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def write_config(folder: Path, model_dir: Path, data: Path, *, output: str = "a run", **keys: Any) -> Path:
    """Write a short run in full precision, without samples and checkpoints."""
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


def run_here(recipe: ModuleType, config: Path, *flags: str, stage: str = "dpo") -> int:
    """Run the recipe in this process and return its exit code."""
    return run_command(lambda: recipe.main(load_config(stage, ["--config", str(config), *flags])))


def read_record(output_dir: Path) -> dict[str, Any]:
    """The run's record."""
    record: dict[str, Any] = json.loads((output_dir / "run.json").read_text())
    return record


def read_events(output_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of that kind."""
    events = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]

"""Rows longer than the positions of a model: every recipe and its check reject them before weights are loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.recipes.preferences import load_recipe
from tests.rows import write_rows

from recipes_lib.commands.check import check
from recipes_lib.config.loader import load_config
from recipes_lib.errors import UserError
from recipes_lib.training.layouts.launch_environment import plan_launch

QUESTION = [{"role": "user", "content": "How many days are in a week, and how many in a year?"}]
ANSWERS = [[{"role": "assistant", "content": f"There are {n} of them, I believe."}] for n in (7, 8)]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": QUESTION + ANSWERS[0]},
    "dpo": {"prompt": QUESTION, "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
    "ppo": {"prompt": QUESTION},
    "pretrain": {"text": "Rivers carry sand from the mountains towards the sea. " * 4},
}
ROWS |= {"lora": ROWS["sft"], "distill": ROWS["sft"], "reward": ROWS["dpo"], "grpo": ROWS["ppo"], "rloo": ROWS["ppo"]}
KEYS: dict[str, dict[str, Any]] = {
    "distill": {"teacher_model_name_or_path": "model"},
    "lora": {"max_length": 256},  # Several rows fit: the longest row counts, not the pack.
    "ppo": {"reward_funcs": "[tests.rl.keys_task:score_first_key]", "response_length": 16},
    "pretrain": {"max_length": 128, "max_tokens": 1024},
}
KEYS |= {"grpo": KEYS["ppo"], "rloo": KEYS["ppo"]}
POSITIONS = 24


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Folder with a model of few positions, without weights: loading them would fail."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model, ignore=lambda *_: ["model.safetensors"])
    limit_positions(model)
    return tmp_path


def limit_positions(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": POSITIONS}))


def build_run(folder: Path, recipe: str, **keys: Any) -> Any:
    rows = folder / "rows.jsonl"
    write_rows(rows, (ROWS[recipe] for _ in range(8)))
    given = {"model_name_or_path": folder / "model", "dataset_name": rows, "output_dir": folder / "run"}
    given |= {"bf16": False} | KEYS.get(recipe, {}) | keys
    if "teacher_model_name_or_path" in given:
        given["teacher_model_name_or_path"] = folder / given["teacher_model_name_or_path"]
    if recipe not in ("ppo", "grpo", "rloo"):
        given["prepared_dir"] = folder / "prepared"
    return load_config(recipe, [f"--{name}={value}" for name, value in given.items()])


def train(recipe: str, config: Any) -> list[str]:
    """Return the problems of the error that a recipe raises."""
    with pytest.raises(UserError) as caught:
        load_recipe(recipe).main(config)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("recipe", ROWS)
def test_training_and_check_reject_rows_longer_than_positions(folder, recipe) -> None:
    config = build_run(folder, recipe)
    checked = [str(problem) for problem in check(config, plan_launch(None, 1), Console(quiet=True))]
    found = [problem for problem in checked if f"more than the {POSITIONS} positions of the model" in problem]
    assert found
    assert train(recipe, config) == found


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_truncated_or_dropped_rows_fit_positions(folder, overlong) -> None:
    short = {"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]}
    config = build_run(folder, "sft", max_length=POSITIONS, overlong=overlong, max_truncated_fraction=1)
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write("".join(json.dumps(short) + "\n" for _ in range(8)))
    checked = [str(problem) for problem in check(config, plan_launch(None, 1), Console(quiet=True))]
    assert not [problem for problem in checked if "positions of the model" in problem]


def test_teacher_with_fewer_positions_is_rejected(folder, tiny_model_dir) -> None:
    config = build_run(folder, "distill", model_name_or_path=tiny_model_dir)
    checked = [str(problem) for problem in check(config, plan_launch(None, 1), Console(quiet=True))]
    assert len(checked) == 1
    assert "teacher_model_name_or_path" in checked[0]
    assert train("distill", config) == checked

"""Fixtures that run ``recipes check`` on a few rows."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.rows import write_rows

from recipes_lib.commands.check import check
from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import find_launch_file
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import Problem
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import MemoryPlan
from recipes_lib.training.layouts.launch_environment import plan_launch


@pytest.fixture(scope="session")
def plan_once() -> Callable[..., MemoryPlan]:
    """``plan_memory``, which takes most of the time of a check, with the plan of a recipe's first call."""
    plans: dict[str, MemoryPlan] = {}

    def plan(config: RecipeConfig, *args: Any, **keys: Any) -> MemoryPlan:
        if config.recipe not in plans:
            plans[config.recipe] = plan_memory(config, *args, **keys)
        return plans[config.recipe]

    return plan


@pytest.fixture(autouse=True)
def _memory(plan_once: Callable[..., MemoryPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes_lib.planning.memory.plan_memory", plan_once)


@pytest.fixture
def run_check(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., tuple[list[Problem], str]]:
    """Run ``check`` for the tiny model over ``rows`` with a launch file; return the problems and the printed report."""

    def run(
        recipe: str, rows: Iterable[Any], *, hardware: str | None = None, num_processes: int = 1, **keys: Any
    ) -> tuple[list[Problem], str]:
        values = {
            "model_name_or_path": tiny_model_dir,
            "dataset_name": write_rows(tmp_path / "rows.jsonl", rows),
            "output_dir": tmp_path / "out",
            **({} if recipe in ("ppo", "rloo", "grpo") else {"prepared_dir": tmp_path / "prepared"}),
            **keys,
        }
        config = load_config(recipe, [f"--{name}={value}" for name, value in values.items()])
        file = find_launch_file(hardware) if hardware else None
        output = io.StringIO()
        console = Console(file=output, width=200, highlight=False)
        problems = check(config, plan_launch(file, num_processes), console, file)
        return problems, output.getvalue()

    return run

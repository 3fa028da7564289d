"""Data and model of tiny runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.faults import recipe_runs
from tests.recipes.preferences import load_recipe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one module with what ``recipe_runs.make_keys`` names."""
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def recipe() -> ModuleType:
    """The script of DPO."""
    return load_recipe()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> None:
    """Runs in this process without what takes the time and is proved elsewhere."""
    monkeypatch.setattr("recipes_lib.publish.final_model.finish_run", lambda run: None)
    monkeypatch.setattr("recipes_lib.training.evaluation.build.measure_matmul_flops", lambda dtype: 1e9)

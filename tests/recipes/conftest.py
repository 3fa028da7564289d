"""Fixtures of the recipe tests: inputs, the DPO script, and runs without report."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.faults import recipe_runs
from tests.recipes.preferences import load_recipe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models and data that ``recipe_runs.make_keys`` names; one per module."""
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def recipe() -> ModuleType:
    """The script of DPO as a module."""
    return load_recipe()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> None:
    """Skip the report, which takes most of the time of a short run in this process."""
    monkeypatch.setattr("recipes_lib.publish.final_model.finish_run", lambda run: None)

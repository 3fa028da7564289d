"""Data and model of tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults import recipe_runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one module with what ``recipe_runs.make_keys`` names."""
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder

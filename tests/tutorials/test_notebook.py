"""The notebook of the tutorials, executed in one namespace with a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import ROOT
from tests.tutorials.test_tutorials import MODELS

NOTEBOOK = ROOT / "docs" / "tutorials" / "library.ipynb"
CHECK = """
assert list(held_out.columns) == ["slow", "fast"] and len(held_out) >= 3
assert held_out["fast"].iloc[-1] < held_out["fast"].iloc[0]
assert problems[0].remedy == "did you mean `learning_rate`?"
assert isinstance(answer, str) and axes.get_ylabel()
"""


def read_cells() -> list[dict[str, object]]:
    cells: list[dict[str, object]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return cells


def test_notebook_has_no_outputs() -> None:
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in read_cells())


@pytest.mark.slow
def test_notebook_cells_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    codes = ["".join(cell["source"]) for cell in read_cells() if cell["cell_type"] == "code"]  # type: ignore[arg-type]
    script = MODELS.sub(str(tiny_model_dir), "\n".join([*codes, CHECK]))
    (tmp_path / "notebook.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

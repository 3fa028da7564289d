"""The notebook of the tutorials, executed in one namespace with a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import ROOT
from tests.tutorials.test_tutorials import MODELS

from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow

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


@pytest.mark.parametrize("page", [NOTEBOOK, NOTEBOOK.with_name("csv.md")])
def test_rows_are_turns_of_the_chat_that_the_page_ends_with(page: Path) -> None:
    """Strings in `prompt` and `completion` would be plain text, in another format than the chat."""
    text = page.read_text(encoding="utf-8")
    assert "chat([{" in text
    columns = re.search(r"\{\\?\"(\w+)\\?\": question, \\?\"(\w+)|```csv\n\s*(\w+),(\w+)\n", text)
    row = RawRow("row", 0, dict.fromkeys(filter(None, columns.groups()), "text"))
    assert canonicalize(row, detect_format(row)).messages


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

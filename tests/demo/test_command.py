"""``recipes demo``: the shipped pipeline from any folder, and rejected arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib import cli


def test_demo_runs_shipped_pipeline_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Path, Path]] = []
    monkeypatch.setattr("recipes_lib.demo.walkthrough.run_demo", lambda *arguments: started.append(arguments) or 3)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 3
    ((file, output_dir),) = started
    assert (file.name, output_dir) == ("demo.yaml", Path("demo"))
    assert (file.parents[1] / "configs" / "demo" / "corpus.yaml").is_file()
    assert cli.main(["demo", "--output", "x"]) == 2
    assert not list(tmp_path.iterdir())

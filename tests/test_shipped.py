"""Location of recipes, configurations and launch files: the working directory first, then the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forked import ROOT

from recipes_lib.errors import ConfigError
from recipes_lib.shipped import find_launch_file, find_recipe, find_shipped


def test_package_files_are_found_outside_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_launch_file("fsdp2") == ROOT / "accelerate_configs" / "fsdp2.yaml"
    assert find_recipe("sft") == ROOT / "recipes" / "sft.py"
    config = Path("recipes/configs/llama3-8b/sft.yaml")
    assert find_shipped(config) == ROOT / config


def test_working_directory_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = Path("accelerate_configs/fsdp2.yaml")
    mine.parent.mkdir()
    mine.write_text("mine")
    assert find_launch_file("fsdp2") == mine
    # The extensions of accelerate's files make a name a path.
    for name in ("other.yaml", "other.yml", "other.json"):
        Path(name).touch()
        assert find_launch_file(name) == Path(name)


def test_other_paths_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("src/recipes_lib"), Path("recipes/none.yaml"), tmp_path / "recipes" / "sft.py"):
        assert find_shipped(path) == path


def test_missing_launch_file_lists_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no launch file accelerate_configs/none.yaml\n.*fsdp2, fsdp2_cp"):
        find_launch_file("none")

"""Planning commands as a user gives them, without a network."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes_lib.cli import main


def unwrap(told: str) -> str:
    """What was told, each row on one line; lines of a curve stay."""
    return re.sub(r"\n {16}(?=[^ ▁-█])", " ", told)


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Give a command, and return what it tells; it fails if it asks the network for anything."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    def tell(*words: object, code: int = 0) -> str:
        assert main([*map(str, words)]) == code
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return unwrap(told.err if code else told.out)

    return tell


@pytest.fixture
def plan_recipe(tell, tiny_model_dir: Path, tmp_path: Path):
    """Write a configuration of a recipe, plan it, and return what was told."""

    def plan_recipe(recipe: str, *flags: object, code: int = 0, **keys: Any) -> str:
        named = {"model_name_or_path": str(tiny_model_dir), "dataset_name": "a/b", "output_dir": "out", **keys}
        path = tmp_path / f"{recipe}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in named.items() if value is not None}))
        return tell("plan", "--config", path, *flags, code=code)

    return plan_recipe

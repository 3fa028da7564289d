"""Fixtures that run planning commands in-process, without a network."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes_lib.cli import main


def unwrap(output: str) -> str:
    """Return output with each row on one line; lines of curves are kept."""
    return re.sub(r"\n {16}(?=[^ ▁-█])", " ", output)


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command and return its output; network connections fail."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("planning needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    def run_command(*words: object, code: int = 0) -> str:
        assert main([*map(str, words)]) == code
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return unwrap(output.err if code else output.out)

    return run_command


@pytest.fixture
def plan_recipe(run_command, tiny_model_dir: Path, tmp_path: Path):
    """Write a configuration of a recipe, plan it, and return the output."""

    def plan_recipe(recipe: str, *flags: object, code: int = 0, **keys: Any) -> str:
        settings = {"model_name_or_path": str(tiny_model_dir), "dataset_name": "a/b", "output_dir": "out", **keys}
        path = tmp_path / f"{recipe}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return run_command("plan", "--config", path, *flags, code=code)

    return plan_recipe

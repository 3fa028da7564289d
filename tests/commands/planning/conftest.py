"""Fixtures that run planning commands in-process, without a network."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def unwrap(output: str) -> str:
    """Return output with each row on one line."""
    return re.sub(r"\n {16}(?=[^ ])", " ", output)


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, recipes: Callable[..., str]):
    """Run a command and return its output; network connections fail."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("planning needs no network"))
    return lambda *words, code=0: unwrap(recipes(*words, code=code))


@pytest.fixture
def plan_recipe(run_command, tiny_model_dir: Path, tmp_path: Path):
    """Write a configuration of a recipe, plan it, and return the output."""

    def plan_recipe(recipe: str, *flags: object, code: int = 0, **keys: Any) -> str:
        settings = {"model_name_or_path": str(tiny_model_dir), "dataset_name": "a/b", "output_dir": "out", **keys}
        path = tmp_path / f"{recipe}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return run_command("plan", "--config", path, *flags, code=code)

    return plan_recipe

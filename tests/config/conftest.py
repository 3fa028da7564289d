"""Minimal valid recipes on disk, and fixtures that return the problems of a modified one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.loader import load_config
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem

PARSERS = {"corpus": CorpusConfig.parse, "eval": EvalConfig.parse, "synthesize": SynthesisConfig.parse}
MINIMAL = """\
model_name_or_path: owner/model
dataset_name: owner/dataset
output_dir: out
learning_rate: 1e-5
"""
MINIMAL_OF = dict.fromkeys(RECIPE_NAMES, MINIMAL) | {
    "pretrain": MINIMAL.replace("learning_rate: 1e-5", "max_length: 1024"),
    "distill": MINIMAL.replace("learning_rate: 1e-5", "teacher_model_name_or_path: owner/teacher"),
    **dict.fromkeys(
        ("ppo", "rloo", "grpo"), MINIMAL.replace("learning_rate: 1e-5", "reward_funcs: [package.module:function]")
    ),
}


@pytest.fixture
def minimal_text() -> str:
    """Text of a minimal valid SFT recipe."""
    return MINIMAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a recipe's text to a file."""

    def write_text(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Any]:
    """Parse configuration text and flags of `clean`, `eval` or `synthesize`."""

    def parse_text(command: str, text: str, *flags: str) -> Any:
        path = tmp_path / f"{command}.yaml"
        path.write_text(text, encoding="utf-8")
        return PARSERS[command](["--config", str(path), *flags])

    return parse_text


@pytest.fixture
def recipes(tmp_path: Path) -> dict[str, Path]:
    """Path of a minimal valid configuration by recipe."""
    paths = {recipe: tmp_path / f"{recipe}.yaml" for recipe in MINIMAL_OF}
    for recipe, path in paths.items():
        path.write_text(MINIMAL_OF[recipe], encoding="utf-8")
    return paths


@pytest.fixture
def problems_of(write: Callable[[str], Path]) -> Callable[..., list[Problem]]:
    """Problems of the minimal recipe with ``added`` lines (``text`` replaces it) and flags."""

    def find(added: str = "", flags: Sequence[str] = (), text: str | None = None, recipe: str = "sft") -> list[Problem]:
        path = write((MINIMAL_OF[recipe] if text is None else text) + added)
        try:
            load_config(recipe, ["--config", str(path), *flags])
        except ConfigError as error:
            return [replace(p, where=p.where.replace(str(path), "recipe.yaml")) for p in error.problems]
        return []

    return find

"""Configurations of planned runs; model and data do not exist unless given."""

from __future__ import annotations

from typing import Any

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig


def build_config(recipe: str = "sft", **keys: Any) -> RecipeConfig:
    """Load the configuration of a recipe with these keys."""
    settings = {"model_name_or_path": "a/b", "dataset_name": "a/c", "output_dir": "out", **keys}
    return load_config(recipe, [f"--{key}={value}" for key, value in settings.items()])

"""Recipe configurations built in memory, without a file."""

from __future__ import annotations

from typing import Any

from recipes_lib.config.schema import DataConfig, EvaluationConfig, ModelConfig, RecipeConfig, TokensConfig


def build_recipe(training: dict[str, Any], recipe: str = "sft", **sections: Any) -> RecipeConfig:
    """Return a configuration with upstream's keys ``training``; missing sections have their defaults."""
    defaults: dict[str, Any] = {
        "data": DataConfig(dataset_name="rows"),
        "tokens": TokensConfig(),
        "model": ModelConfig(),
        "evaluation": EvaluationConfig(),
    }
    return RecipeConfig(recipe=recipe, path=None, training=training, **defaults | sections)

"""Decisions between keys, and values that the plan chooses."""

from __future__ import annotations

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.settings import is_local
from recipes_lib.config.table import RECIPE_NAMES


def test_is_local_never_raises() -> None:
    assert not any(is_local(text) for text in ("", "\0", "x" * 5000, None, 3))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_activation_checkpointing_accepts_bool_auto_and_null(recipes, problems_of, recipe) -> None:
    for written, expected in {"true": True, "false": False, "null": None, "auto": "auto"}.items():
        flags = ["--config", str(recipes[recipe]), f"--activation_checkpointing={written}"]
        assert load_config(recipe, flags).training["activation_checkpointing"] == expected
    (problem,) = problems_of("activation_checkpointing: often\n", recipe=recipe)
    assert problem.remedy == "write true or false or one of auto or null"

"""Synonyms of keys in other programs."""

from __future__ import annotations

import pytest

from recipes_lib.config.loader import read_synonyms
from recipes_lib.config.recipes import read_known
from recipes_lib.config.table import RECIPE_NAMES, load_table

SYNONYMS = read_synonyms()
KEYS = {key for recipe in RECIPE_NAMES for key in load_table(recipe).keys}


def test_synonyms_map_to_keys_and_are_not_keys() -> None:
    assert set(SYNONYMS.values()) <= KEYS
    assert not SYNONYMS.keys() & KEYS
    # Retired keys have their own explanation.
    assert not [name for recipe in RECIPE_NAMES for name in SYNONYMS if name in read_known(recipe)]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_synonym_suggests_key_of_the_recipe(problems_of, recipe: str) -> None:
    for name in ("lr", "batch_size", "epochs", "peft_config", "seq_len", "pref_beta", "group_size"):
        (problem,) = problems_of(flags=[f"--{name}", "1"], recipe=recipe)
        key, keys = SYNONYMS[name], load_table(recipe).keys
        assert (f"did you mean `{key}`?" in problem.remedy) is (key in keys), name
        assert key in keys or f"`{key}`" in problem.remedy, name

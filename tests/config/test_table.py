"""Generated tables of keys."""

from __future__ import annotations

import json

import pytest

from recipes_lib.config.table import TABLES, describe, load_table


@pytest.mark.parametrize("recipe", TABLES)
def test_every_key_has_group_help_and_type(recipe: str) -> None:
    table = load_table(recipe)
    for key in table.keys.values():
        assert key.group in table.groups
        assert key.help
        assert key.schema["type"]
        assert describe(key.schema)


@pytest.mark.parametrize("recipe", TABLES)
def test_default_has_declared_type(recipe: str) -> None:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    table = load_table(recipe)
    for key in table.keys.values():
        if key.name not in table.required:
            allowed = set(key.schema["type"]) | ({"integer"} if "number" in key.schema["type"] else set())
            assert kinds[type(key.default)] in allowed, key.name
            assert key.default in key.schema.get("enum", [key.default]), key.name
        json.dumps(key.default)


def test_load_table_raises_value_error_for_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="unknown recipe"):
        load_table("nonsense")


def test_describe_schema() -> None:
    assert describe({"type": ["number", "null"]}) == "a number or null"
    assert describe({"type": ["string", "null"], "enum": ["a", "b", None]}) == "one of a, b or null"
    assert describe({"type": ["array"], "items": {"type": ["string"]}}) == "a list of texts"


@pytest.mark.parametrize("recipe", TABLES)
def test_help_is_not_that_of_a_key_deprecated_upstream(recipe: str) -> None:
    """It advises another key of TRL, which the recipe refuses."""
    assert not [name for name, key in load_table(recipe).keys.items() if "deprecated" in key.help.lower()]

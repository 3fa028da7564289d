"""Generated tables, schemas and pages against the installed dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.config.generate import SECTIONS, build_documents, build_tables, read_defaults
from trl import SFTConfig

from recipes_lib.config.recipes import read_refused
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table, table_path


@pytest.fixture(scope="module")
def documents() -> Mapping[Path, str]:
    """Text of every generated schema and page by path."""
    return build_documents()


def test_generated_files_are_up_to_date(documents) -> None:
    for path, text in {**build_tables(), **documents}.items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run python -m tests.config.generate"


def test_upstream_defaults_match_installed_dataclasses() -> None:
    upstream = {field.name: field for field in dataclasses.fields(SFTConfig)}
    ours = {field.name for section in SECTIONS["sft"].values() for field in dataclasses.fields(section)}
    for key in load_table("sft").keys.values():
        if key.name not in ours:
            default = upstream[key.name].default
            default = default.value if isinstance(default, enum.Enum) else default
            assert (key.upstream_default if key.reason else key.default) == default, key.name


@pytest.mark.parametrize("recipe", TABLES)
def test_section_fields_are_in_table_with_defaults(recipe: str) -> None:
    table, refused, defaults = load_table(recipe), read_refused(recipe), read_defaults(recipe)
    for group, section in SECTIONS[recipe].items():
        fields = [field for field in dataclasses.fields(section) if field.name not in refused]
        assert [field.name for field in fields] == [key.name for key in table.keys.values() if key.group == group]
        for field in fields:
            if recipe in RECIPE_NAMES or field.name not in table.required:
                assert table.keys[field.name].default == defaults.get(field.name, (field.default,))[0]


def test_editor_schema_lists_every_key() -> None:
    schema = json.loads(table_path("sft").with_name("sft.schema.json").read_text(encoding="utf-8"))
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == load_table("sft").keys.keys()
    assert all(described["description"] for described in schema["properties"].values())
    assert schema["required"] == ["model_name_or_path", "output_dir"]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_common_keys_of_the_recipe_precede_shared_ones(documents, recipe: str) -> None:
    page = next(text for path, text in documents.items() if path.name == f"{recipe}.md")
    section = page.partition("## Common keys")[2].partition("\n## ")[0]
    links = re.findall(r"^\| \[`\w+`\]\((.*?)#", section, re.MULTILINE)
    assert len(links) > 10
    assert links == sorted(links)

"""Generated reference pages of keys."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from tests.config.generate import build_reference, find_shared_keys, read_common, read_defaults

from recipes_lib.config.recipes import read_refused
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table

PAGES = build_reference()
DEFINED = {page: re.findall(r'^\| <a id="(\w+)"></a>`\1` \|', text, re.MULTILINE) for page, text in PAGES.items()}


@pytest.mark.parametrize("recipe", TABLES)
def test_page_defines_or_links_every_key_of_its_recipe(recipe: str) -> None:
    text, own = PAGES[f"configs/{recipe}.md"], DEFINED[f"configs/{recipe}.md"]
    linked = set(re.findall(r"\(shared\.md#(\w+)\)", text))
    assert linked <= set(DEFINED["configs/shared.md"])
    assert not linked & set(own)
    assert linked | set(own) == set(load_table(recipe).keys)


def test_key_is_repeated_on_pages_only_if_its_definition_differs() -> None:
    assert all(max(Counter(names).values(), default=1) == 1 for names in DEFINED.values())
    counts = Counter(name for page in ["shared", *RECIPE_NAMES] for name in DEFINED[f"configs/{page}.md"])
    for name in (name for name, count in counts.items() if count > 1):
        keys = [load_table(recipe).keys[name] for recipe in RECIPE_NAMES if name in load_table(recipe).keys]
        assert len({str((key.schema, key.help, key.group)) for key in keys}) > 1, name


def test_shared_page_lists_recipes_of_every_key() -> None:
    for name in find_shared_keys():
        row = next(row for row in PAGES["configs/shared.md"].splitlines() if row.startswith(f'| <a id="{name}">'))
        cell = row.split("|")[-2].strip()
        listed = set(cell.removeprefix("all but ").split(", ")) if cell != "all" else set()
        having = {recipe for recipe in RECIPE_NAMES if name in load_table(recipe).keys}
        assert having == (listed if cell != "all" and not cell.startswith("all but") else {*RECIPE_NAMES} - listed)


def test_pages_give_the_default_of_every_recipe() -> None:
    for recipe in RECIPE_NAMES:
        for name, key in load_table(recipe).keys.items():
            page = recipe if name in DEFINED[f"configs/{recipe}.md"] else "shared"
            row = next(row for row in PAGES[f"configs/{page}.md"].splitlines() if row.startswith(f'| <a id="{name}">'))
            cell = row.split(" | ")[2]
            general = cell.split("; ")[0]
            given = {
                one: other.split()[-1] for other in cell.split("; ")[1:] for one in re.findall(r"\w+(?=[ ,])", other)
            }
            assert given.get(recipe, general).strip("`") in (json.dumps(key.default, ensure_ascii=False), "required"), (
                name
            )


@pytest.mark.parametrize("recipe", TABLES)
def test_common_keys_exist_and_are_few(recipe: str) -> None:
    common = read_common(recipe)
    assert sorted(set(common) - set(load_table(recipe).keys)) == []
    assert len(common) == len(set(common))
    assert 10 <= len(common) <= 32
    assert set(load_table(recipe).required) <= set(common)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_refused_keys_are_documented(recipe: str) -> None:
    text = PAGES[f"configs/{recipe}.md"] + PAGES["configs/shared.md"]
    refused = "\n".join(re.findall(r"^\| (`\w+`(?: `\w+`)*) \|", text, re.MULTILINE))
    assert sorted(set(read_refused(recipe)) - set(re.findall(r"`(\w+)`", refused))) == []


def test_table_rows_have_as_many_cells_as_their_header() -> None:
    for text in PAGES.values():
        width = 0
        for line in text.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            if cells and not width:
                width = cells
            assert cells in (0, width), line
            width = cells


def test_reasons_of_changed_defaults_are_documented() -> None:
    for recipe in RECIPE_NAMES:
        text = PAGES[f"configs/{recipe}.md"] + PAGES["configs/shared.md"]
        assert all(reason in text for _, reason in read_defaults(recipe).values())

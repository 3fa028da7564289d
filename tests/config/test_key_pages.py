from __future__ import annotations

import re
from collections import Counter

import pytest

from recipes_lib.config.generate import build_reference, find_shared_keys
from recipes_lib.config.recipes import read_common, read_defaults, read_refused
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table

PAGES = build_reference()
DEFINED = {page: re.findall(r'^\| <a id="(\w+)"></a>`\1` \|', text, re.MULTILINE) for page, text in PAGES.items()}


@pytest.mark.parametrize("recipe", TABLES)
def test_a_page_describes_every_key_of_its_recipe_once_or_links_to_where_it_is(recipe: str) -> None:
    text, own = PAGES[f"configs/{recipe}.md"], DEFINED[f"configs/{recipe}.md"]
    linked = set(re.findall(r"\(shared\.md#(\w+)\)", text))
    assert linked <= set(DEFINED["configs/shared.md"])
    assert not linked & set(own)
    assert linked | set(own) == set(load_table(recipe).keys)


def test_a_key_stands_on_one_page_unless_its_values_or_meaning_differ() -> None:
    assert all(max(Counter(names).values(), default=1) == 1 for names in DEFINED.values())
    counts = Counter(name for page in ["shared", *RECIPE_NAMES] for name in DEFINED[f"configs/{page}.md"])
    for name in (name for name, count in counts.items() if count > 1):
        keys = [load_table(recipe).keys[name] for recipe in RECIPE_NAMES if name in load_table(recipe).keys]
        assert len({str((key.schema, key.help, key.group)) for key in keys}) > 1, name


def test_the_shared_page_names_the_recipes_that_have_a_key() -> None:
    for name in find_shared_keys():
        row = next(row for row in PAGES["configs/shared.md"].splitlines() if row.startswith(f'| <a id="{name}">'))
        told = row.split("|")[-2].strip()
        listed = set(told.removeprefix("all but ").split(", ")) if told != "all" else set()
        having = {recipe for recipe in RECIPE_NAMES if name in load_table(recipe).keys}
        assert having == (listed if told != "all" and not told.startswith("all but") else {*RECIPE_NAMES} - listed)


@pytest.mark.parametrize("recipe", TABLES)
def test_the_keys_that_users_touch_exist_and_are_about_twenty(recipe: str) -> None:
    common = read_common(recipe)
    assert sorted(set(common) - set(load_table(recipe).keys)) == []
    assert len(common) == len(set(common))
    assert 10 <= len(common) <= 32
    assert set(load_table(recipe).required) <= set(common)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_refused_key_is_on_the_page_of_the_recipe_or_on_the_shared_one(recipe: str) -> None:
    text = PAGES[f"configs/{recipe}.md"] + PAGES["configs/shared.md"]
    refused = "\n".join(re.findall(r"^\| (`\w+`(?: `\w+`)*) \|", text, re.MULTILINE))
    assert sorted(set(read_refused(recipe)) - set(re.findall(r"`(\w+)`", refused))) == []


def test_the_rows_of_each_table_have_the_columns_of_its_head() -> None:
    for text in PAGES.values():
        width = 0
        for line in text.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            if cells and not width:
                width = cells
            assert cells in (0, width), line
            width = cells


def test_the_reference_gives_the_reason_of_each_other_default() -> None:
    for recipe in RECIPE_NAMES:
        text = PAGES[f"configs/{recipe}.md"] + PAGES["configs/shared.md"]
        assert all(reason in text for _, reason in read_defaults(recipe).values())

from __future__ import annotations

import re

from recipes_lib.config.generate import format_reference
from recipes_lib.config.migration.renames import read_renames
from recipes_lib.config.recipes import read_defaults, read_refused
from recipes_lib.config.table import RECIPE_NAMES, load_table


def test_the_reference_names_every_key_that_can_be_met() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", format_reference(), re.MULTILINE))
    assert named == {*read_renames().retired} | {
        key for recipe in RECIPE_NAMES for key in [*load_table(recipe).keys, *read_refused(recipe)]
    }


def test_the_rows_of_each_table_have_the_columns_of_its_head() -> None:
    width = 0
    for line in format_reference().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and not width:
            width = cells
        assert cells in (0, width), line
        width = cells


def test_the_reference_gives_the_reason_of_each_other_default() -> None:
    text = format_reference()
    assert all(reason in text for recipe in RECIPE_NAMES for _, reason in read_defaults(recipe).values())

"""The generated migration page against the behaviour of `migrate`."""

from __future__ import annotations

import pytest
from tests.config.generate import describe_fate, format_migration

from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.recipes import read_renames
from recipes_lib.config.table import load_table

NAMED = {**read_renames().elsewhere, **read_renames().retired}


@pytest.mark.parametrize("key", sorted(NAMED.keys() - load_table("sft").keys.keys()))
def test_migration_page_row_describes_behaviour_of_migrate(key, write, minimal_text: str) -> None:
    retired = NAMED[key]
    fate = describe_fate(key, retired)
    recipe = next(name for name in ("sft", "ppo", "rloo") if retired.new in (None, *load_table(name).keys))
    text, changes, *_ = migrate(write(f"{minimal_text}{key}: some value of nobody's\n"), recipe)
    change = next(change for change in changes if change.line)
    lines = text.splitlines()
    if retired.new and f"{retired.new}:" in minimal_text:
        assert change.by_hand
        assert not any(key in line.split(":")[0] for line in lines)
    elif fate == "is deleted":
        assert not change.by_hand
        assert not any(key in line.split(":")[0] for line in lines)
    elif "you decide" in fate:
        assert change.by_hand
        assert any(line.startswith(f"# {key}:") for line in lines)
    else:
        assert fate == f"becomes `{retired.new}`"
        assert f"{retired.new}: some value of nobody's" in lines


def test_migration_page_lists_every_key() -> None:
    page = format_migration()
    first = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    for key in NAMED:
        assert sum(f"`{key}`" in cell for cell in first) >= 1, key

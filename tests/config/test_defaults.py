from __future__ import annotations

import dataclasses

from recipes_lib.config.defaults import BOUNDS, CHOICES, NOTES, SHARE_OR_COUNT
from recipes_lib.config.table import STAGES, load_table


def test_the_policy_speaks_of_keys_that_exist() -> None:
    keys = {key for stage in STAGES for key in load_table(stage).keys}
    assert keys >= set(CHOICES) | set(NOTES) | set(SHARE_OR_COUNT)
    assert keys | {"weight", "repeat", "start_tokens"} >= set(BOUNDS)


def test_a_table_carries_the_bounds() -> None:
    for stage in STAGES:
        for name, key in load_table(stage).keys.items():
            assert dict(key.schema) | dict(BOUNDS.get(name, {})) == dict(key.schema)
    assert dataclasses.is_dataclass(load_table("sft").keys["seed"])

from __future__ import annotations

import dataclasses

import pytest
from trl import SFTConfig

from recipes_lib.config.loader import load_config
from recipes_lib.config.policy import BOUNDS, CHOICES, DEFAULTS, NOTES, REFUSED, SHARE_OR_COUNT
from recipes_lib.config.secrets import is_secret_key
from recipes_lib.config.table import load_table

UPSTREAM = {field.name for field in dataclasses.fields(SFTConfig)}


def test_every_upstream_key_is_honoured_or_refused_and_never_both() -> None:
    honoured = set(load_table("sft").keys)
    refused = set(REFUSED) | {key for key in UPSTREAM - honoured if is_secret_key(key)}
    assert not UPSTREAM - honoured - refused
    assert not honoured & refused
    assert refused <= UPSTREAM


def test_the_policy_speaks_of_keys_that_exist() -> None:
    keys = set(load_table("sft").keys)
    assert keys >= set(DEFAULTS) | set(CHOICES) | set(NOTES) | set(SHARE_OR_COUNT)
    assert keys | {"weight"} >= set(BOUNDS)
    assert set(DEFAULTS) <= UPSTREAM


def test_our_defaults_differ_from_upstream_or_are_pinned_and_say_why() -> None:
    keys = load_table("sft").keys
    same = {name for name in DEFAULTS if keys[name].default == keys[name].upstream_default}
    assert same == {"report_to"}
    assert all(reason for _, reason in DEFAULTS.values())


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_key_says_why(problems_of, key: str) -> None:
    (problem,) = problems_of(f"{key}: 1\n")
    assert problem.where == "recipe.yaml:5"
    assert problem.found.startswith(f"`{key}` ")
    assert REFUSED[key].new is None or REFUSED[key].new in load_table("sft").keys


def test_upstream_takes_what_a_recipe_gives_it(write, sound: str, tmp_path) -> None:
    config = load_config("sft", ["--config", str(write(sound)), "--use_cpu", "--output_dir", str(tmp_path)])
    arguments = SFTConfig(**config.training)
    for key, (value, _) in DEFAULTS.items():
        if key != "report_to":
            assert getattr(arguments, key) == value

"""Loading of configurations: provenance, order of problems, robustness against arbitrary input."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.config.generate import read_defaults

from recipes_lib.config.loader import check_text, choose_recipe, drop_flags, load_config
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError, Problem

KEYS = sorted(load_table("sft").keys)


def test_training_section_holds_explicit_keys_and_changed_defaults(write, minimal_text: str) -> None:
    config = load_config("sft", ["--config", str(write(minimal_text))])
    ours = {key: value for key, (value, _) in read_defaults("sft").items()}
    assert dict(config.training) == {"output_dir": "out", "learning_rate": 1e-5} | ours


def test_recipe_flag_takes_precedence_over_file(tmp_path: Path) -> None:
    assert choose_recipe(None, "dpo_long.yaml") == "dpo"
    assert choose_recipe("reward", "dpo.yaml") == "reward"
    path = tmp_path / "mine.yaml"
    path.write_text("output_dir: out\nsources:\n  - {name: texts/}\n")
    assert choose_recipe(None, str(path), ("sft", "corpus")) == "corpus"
    assert choose_recipe("sft", str(path), ("sft", "corpus")) == choose_recipe(None, str(path), ("sft",)) == "sft"
    for unreadable in (tmp_path, tmp_path / "gone.yaml", path / "below"):
        assert choose_recipe(None, str(unreadable), ("sft", "corpus")) == "sft"
    with pytest.raises(ConfigError, match="--recipe: there is no recipe 'dop'"):
        choose_recipe("dop", None)


def test_all_problems_are_reported_in_file_order(write) -> None:
    path = write("learning_rte: 1\nmax_steps: x\ndataset_name: a/b\ndataset_name: c/d\nmodel_name_or_path: ./gone\n")
    with pytest.raises(ConfigError) as caught:
        load_config("sft", ["--config", str(path), "--bf16", "maybe"])
    places = [problem.where.removeprefix(f"{path}:") for problem in caught.value.problems]
    assert places == ["1", "2", "4", "5", "--bf16", str(path)]
    assert caught.value.exit_code == 2


def test_unknown_keys_beyond_limit_are_counted(problems_of) -> None:
    """A file of another program is not searched for similar names key by key, which took a second for 1,000 keys."""
    problems = problems_of("".join(f"key{number}: 1\n" for number in range(1000)))
    assert [problem.where for problem in problems] == [f"recipe.yaml:{line}" for line in range(5, 56)]
    assert problems[-1].found == "more unknown keys: 950"
    assert "docs/configs/sft.md" in problems[-1].remedy


@pytest.mark.parametrize(("num_keys", "is_foreign"), [(2, False), (3, True)])
def test_file_of_another_program_is_referred_to_migration(num_keys, is_foreign, problems_of) -> None:
    keys = ["base_model: a/b\n", "micro_batch_size: 2\n", "torch_dtype: auto\n"]
    problems = problems_of("".join(keys[:num_keys]))
    assert any("recipes check --migrate" in problem.remedy for problem in problems) is is_foreign


def test_similar_problems_are_one(problems_of) -> None:
    entries = "".join(f"  - {{name: a/b, weight: -{number}}}\n" for number in range(1, 101))
    (problem,) = problems_of(f"adam_beta1: x\nadam_beta2: x\ndataset_mixture:\n{entries}")[2:]
    assert problem.where == "recipe.yaml:8"
    assert problem.found.startswith("`dataset_mixture[0].weight` is -1; so in 100 places, next ")


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        (["--seed", "7", "--max_steps=3", "--bf16"], ["--max_steps=3", "--bf16"]),
        (["--max-steps", "3", "--seed=7", "--lr", "1e-5"], ["--max-steps", "3", "--lr", "1e-5"]),
        (["--seed"], []),
        (["--seed", "-1", "--bf16", "false"], ["--bf16", "false"]),
        ([], []),
    ],
)
def test_drop_flags_removes_flag_and_value(typed: list[str], left: list[str]) -> None:
    assert drop_flags(typed, {"seed"}) == left
    assert drop_flags(["--num-seeds", "1"], {"num_seeds"}) == []


def assert_loads_or_raises_config_error(load: Callable[[], object]) -> None:
    """Assert that ``load`` returns or raises a `ConfigError` with location and finding."""
    problems: Sequence[Problem] = [Problem("nowhere", "nothing")]
    try:
        load()
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert all(problem.where and problem.found for problem in problems)


@settings(max_examples=150)
@given(st.text())
def test_arbitrary_text_raises_only_config_error(text: str) -> None:
    assert_loads_or_raises_config_error(lambda: check_text("sft", text, Path("fuzz.yaml")))


@pytest.mark.parametrize("value", ["a" * 300, "a\0b"])
def test_invalid_file_names_raise_only_config_error(value: str) -> None:
    for key, written in itertools.product(KEYS, (value, [value])):
        text = json.dumps({key: written})
        assert_loads_or_raises_config_error(lambda text=text: check_text("sft", text, Path("long.yaml")))


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.dates(), st.binary(max_size=4))
NAMES = st.sampled_from(KEYS) | st.text(max_size=8)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.lists(st.dictionaries(NAMES, LEAVES, max_size=3), max_size=3)


@settings(max_examples=150)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_arbitrary_mapping_raises_only_config_error(mapping: dict) -> None:
    text = yaml.safe_dump(mapping)
    assert_loads_or_raises_config_error(lambda: check_text("sft", text, Path("fuzz.yaml")))


@settings(max_examples=100)
@given(st.lists(st.sampled_from([f"--{key}" for key in KEYS]) | st.text(), max_size=6))
def test_arbitrary_command_line_raises_only_config_error(argv: list[str]) -> None:
    assert_loads_or_raises_config_error(lambda: load_config("sft", argv))

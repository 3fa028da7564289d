"""Conversion of values to the declared type of their key."""

from __future__ import annotations

from typing import Any

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.table import RECIPE_NAMES, load_table
from recipes_lib.config.values import INVALID, Reader, plain_value, read_entries
from recipes_lib.errors import Problem


def read(line: str) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    (entry,) = read_entries(line, "f.yaml", problems)
    reader = Reader(entry.locate, problems)
    return reader.read(entry.key, entry.node, load_table("sft").keys[entry.key].schema), problems


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("learning_rate: 1e-5", 1e-5),
        ("learning_rate: 2.0e-05", 2e-5),
        ("learning_rate: '1e-5'", 1e-5),
        ("max_steps: 1_000", 1000),
        ("max_steps: '10'", 10),
        ("packing: yes", True),
        ("packing: off", False),
        ("log_level: INFO", "info"),
        ("lr_scheduler_type: Cosine", "cosine"),
        ("bf16: True", True),
        ("bf16: ~", None),
        ("bf16:", None),
        ("eval_strategy: no", "no"),
        ("eval_strategy: false", "no"),
        ("dataset_revision: 1234567", "1234567"),
        ("run_name: 2026-11-21", "2026-11-21"),
        ("run_name: 'null'", "null"),
        ("trackio_static_space_id: false", False),
        ("activation_checkpointing: 'true'", True),
        ("report_to: wandb", "wandb"),
        ("report_to: [wandb, trackio]", ["wandb", "trackio"]),
        ("lr_scheduler_kwargs: {min_lr: 1e-6, decay: cosine}", {"min_lr": 1e-6, "decay": "cosine"}),
        ("dataset_mixture: a/b", [{"name": "a/b"}]),
        ("dataset_mixture: [{name: a/b, weight: 2}]", [{"name": "a/b", "weight": 2}]),
        ("test_split_size: 100", 100),
        # A scalar becomes a list of one item.
        ("sample_prompts: hello", ["hello"]),
        ("sample_prompts: hello, world", ["hello, world"]),
        # Choices may be separated by commas; paths are not split.
        ("report_to: wandb, trackio", ["wandb", "trackio"]),
        ("eval_tasks: arc_easy,piqa", ["arc_easy", "piqa"]),
        ("eval_tasks_include_path: a/b,c", ["a/b,c"]),
        ("metrics: 'a.b:C'", ["a.b:C"]),
        ("sample_prompts: null", None),
    ],
)
def test_value_is_converted_to_declared_type(line: str, value: Any) -> None:
    got, problems = read(line)
    assert not problems
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("learning_rate: fast", "number"),
        ("learning_rate: .nan", "number"),
        ("learning_rate: 1e999", "number"),
        ("learning_rate: 5x", "write a number"),
        ("learning_rate: -1e-5", "above 0"),
        ("learning_rate: [1e-5]", "number"),
        ("max_steps: 1.5", "whole number"),
        ("max_steps: 1e3", "1000"),
        ("max_steps: 10B", "write 10000000000"),
        ("max_steps: 2.3 m", "write 2300000"),
        ("warmup_steps: 1,000", "write 1000"),
        ("warmup_steps: 1k", "write 1000"),
        ("packing: 1k", "write true or false"),
        ("max_steps: 99999999999999999999", "whole number"),
        ("warmup_steps: 3%", "write 0.03"),
        ("seed: 007", "7"),
        ("seed: 1:30", "whole number"),
        ("seed:", "whole number"),
        ("packing: 1", "true or false"),
        ("packing: maybe", "true or false"),
        ("eos_token: None", "null"),
        ("pad_token: [PAD]", "quote a text in brackets"),
        ("eval_strategy: off", "one of"),
        ("optim: adamw_hf", "adamw_torch"),
        ("optim: adam_torch", "did you mean adamw_torch"),
        ("optim: adamw", "did you mean adamw_torch"),
        ("optim: AdamW", "did you mean adamw_torch"),
        ("report_to: wandbb", "did you mean wandb"),
        ("report_to: [wandbb]", "did you mean wandb"),
        ("dataset_mixture: ''", "a list of mappings"),
        ("dataset_mixture: '[{name: a/b}]'", "delete the quotes"),
        ("lr_scheduler_kwargs: 3", "mapping"),
        ("lr_scheduler_kwargs: '{\"num_cycles\": 1}'", "delete the quotes"),
        ("dataset_mixture: {name: a/b}", "write a list of mappings or null: [{name: a/b}, ...]"),
        ("dataset_mixture: {a/b: 0.5, c/d: 0.5}", ": [{name: a/b}, ...]"),
        ("dataset_mixture: [{id: a/b}]", "write `name`"),
        ("dataset_mixture: [{weight: 1}]", "name"),
        ("dataset_mixture: [{name: a/b, weight: 0}]", "above 0"),
        ("dataset_mixture: [{name: a/b, splt: x}]", "split"),
        ("max_length: 4", "at least 8"),
        ("adam_beta2: 1", "below 1"),
        ("weight_decay: 2", "at most 1"),
    ],
)
def test_value_of_wrong_type_is_refused_with_remedy(line: str, remedy: str) -> None:
    got, problems = read(line)
    assert got is INVALID
    assert len(problems) == 1
    assert problems[0].where == "f.yaml:1"
    assert remedy in problems[0].remedy


def test_every_problem_in_a_list_has_its_line() -> None:
    _, problems = read("dataset_mixture:\n  - name: a/b\n    weight: -1\n  - path: c/d\n    weight: x\n")
    assert sorted(problem.where for problem in problems) == ["f.yaml:3", "f.yaml:4", "f.yaml:5"]


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "{b: {a: 1, a: 2}}", "{b: [{c: {a: 1, a: 2}}]}", "{b: {[a]: 1}}"])
def test_duplicate_key_is_refused_at_every_level(text: str) -> None:
    _, problems = read(f"activation_checkpointing_kwargs: {text}")
    (problem,) = problems
    assert problem.where == "f.yaml:1"
    assert "`a` is repeated" in problem.found or "a key is a list" in problem.found


def test_plain_value_keeps_quoted_scalars_as_text() -> None:
    (entry,) = read_entries("a: {b: '1', c: 1, d: yes, e: 1e-3, f: [x, ~]}", "f.yaml", [])
    assert plain_value(entry.node) == {"b": "1", "c": 1, "d": True, "e": 1e-3, "f": ["x", None]}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_activation_checkpointing_accepts_bool_auto_and_null(recipes, problems_of, recipe) -> None:
    for written, expected in {"true": True, "false": False, "null": None, "auto": "auto"}.items():
        flags = ["--config", str(recipes[recipe]), f"--activation_checkpointing={written}"]
        assert load_config(recipe, flags).training["activation_checkpointing"] == expected
    (problem,) = problems_of("activation_checkpointing: often\n", recipe=recipe)
    assert problem.remedy == "write true or false or one of auto or null"

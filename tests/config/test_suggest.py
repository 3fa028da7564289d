from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("line", "found", "remedy"),
    [
        ("learning_rte: 1", "unknown key", "did you mean `learning_rate`?"),
        ("Learning-Rate: 1", "unknown key", "did you mean `learning_rate`?"),
        ("max_seq_lenght: 1", "unknown key", "did you mean `max_length`?"),
        ("zzz: 1", "unknown key", "docs/configs.md"),
        ("no_packing: true", "unknown key", "`packing: false`"),
        ("max_seq_length: 512", "renamed to `max_length`", "write `max_length`"),
        ("warmup_ratio: 0.1", "removed in transformers 5.15", "warmup_steps"),
        ("fsdp: true", "hardware", "accelerate"),
        ("use_peft: true", "not a key of this stage", "lora"),
        ("beta: 0.1", "not a key of this stage", "dpo"),
        ("mixed_precision: bf16", "accelerate YAML", "accelerate"),
        ("weight: 2", "`dataset_mixture` entry", "inside the entry"),
        ("training:\n  max_steps: 3", "keys are flat", "move max_steps to the left margin"),
        ("data: {x: 1}", "keys are flat", "left margin"),
        ("assistant_only_loss: true", "`loss_on`", "loss_on: assistant"),
        ("packing_strategy: bfd", "not needed", "overlong: split"),
    ],
)
def test_an_unknown_key_says_what_to_write(problems_of, line: str, found: str, remedy: str) -> None:
    (problem,) = problems_of(line + "\n")
    assert problem.where == "recipe.yaml:5"
    assert found in problem.found
    assert remedy in problem.remedy


def test_both_spellings_at_once_name_the_line_to_delete(problems_of) -> None:
    (problem,) = problems_of("warmup_steps: 10\nwarmup_ratio: 0.1\n")
    assert problem.where == "recipe.yaml:6"
    assert "delete the line" in problem.remedy
    assert "warmup_steps" in problem.remedy


def test_a_retired_spelling_is_not_reported_as_missing_too(problems_of) -> None:
    text = "model_name_or_path: a/b\noutput_dir: o\ndataset_mixer:\n  a/b: 1.0\n"
    assert [problem.where for problem in problems_of(text=text)] == ["recipe.yaml:3"]

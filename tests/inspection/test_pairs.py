"""``recipes check`` of recipes that train on preference pairs."""

from __future__ import annotations

import re

import pytest
from tests.recipes.preferences import make_rows
from trl import DPOConfig

ROWS = [
    {"prompt": f"What is {n} plus {n}? " * 3, "chosen": f"It is {2 * n}.", "rejected": f"Maybe {n}, who knows."}
    for n in range(12)
]


@pytest.mark.parametrize("recipe", ["reward", "dpo"])
def test_valid_run_is_ready_with_figures_of_rows(look, recipe):
    problems, told = look(recipe, ROWS, test_split_size=2, per_device_train_batch_size=2)
    assert problems == []
    assert "rows.jsonl: `preference` layout, from chosen, rejected, prompt" in told
    assert "10 pairs under 10 prompts" in told
    assert "held out: 2 pairs" in told
    assert "5 steps, 1.00 epochs" in told
    assert "a prompt is computed once for both answers, which saves" in told
    assert told.endswith("ready to train\n")


def test_learning_rates_and_groups_are_those_of_recipe(look):
    """A preference run that names no rate has upstream's for the recipe, which is not that of fine-tuning."""
    rate = DPOConfig(output_dir="out", bf16=False).learning_rate
    _, told = look("dpo", ROWS, bf16="false", lr_scheduler_type="constant")
    assert f"learning rate at 0, 25, 50, 75, 100 %: {', '.join([f'{rate:.2e}'] * 5)}" in told
    assert set(re.findall("rate ([0-9.e-]+):", told)) == {f"{rate:.1e}"}


def test_unshared_prompts_are_reported_with_reason(look):
    problems, told = look("dpo", ROWS, shared_prompt="false")
    assert problems == []
    assert "a prompt is computed once for each answer: `shared_prompt` is false" in told


@pytest.mark.parametrize(("rows", "token"), [(ROWS, "<|endoftext|>"), (make_rows(), "<|im_end|>")])
def test_pad_token_that_ends_answers_is_reported_for_reward_model(look, rows, token):
    problems, _ = look("reward", rows, pad_token=token)
    assert [problem.where for problem in problems] == ["pad_token"]
    assert "read the score before the end" in problems[0].found
    assert look("dpo", ROWS, pad_token="<|endoftext|>")[0] == []


def test_broken_rows_are_reported(look):
    problems, told = look("dpo", [*ROWS, {"prompt": "a", "chosen": "b", "rejected": "b"}])
    assert "rows.jsonl:13" in problems[0].where
    assert "has no preference" in problems[0].remedy
    assert "✗ data" in told

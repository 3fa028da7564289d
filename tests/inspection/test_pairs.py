"""The inspection of a run over pairs says what will be trained on, and what would go wrong, before training."""

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
def test_a_sound_run_is_ready_and_its_figures_are_those_of_the_rows(look, recipe):
    problems, told = look(recipe, ROWS, test_split_size=2, per_device_train_batch_size=2)
    assert problems == []
    assert "rows.jsonl: `preference` layout, from chosen, rejected, prompt" in told
    assert "10 pairs under 10 prompts" in told
    assert "held out: 2 pairs" in told
    assert "5 steps, 1.00 epochs" in told
    assert "a prompt is computed once for both answers, which saves" in told
    assert told.endswith("ready to train\n")


def test_the_rates_and_groups_that_are_told_are_those_of_the_recipe(look):
    """A preference run that names no rate has upstream's for the recipe, which is not that of fine-tuning."""
    rate = DPOConfig(output_dir="out", bf16=False).learning_rate
    _, told = look("dpo", ROWS, bf16="false", lr_scheduler_type="constant")
    assert f"learning rate at 0, 25, 50, 75, 100 %: {', '.join([f'{rate:.2e}'] * 5)}" in told
    assert set(re.findall("rate ([0-9.e-]+):", told)) == {f"{rate:.1e}"}


def test_prompts_that_are_not_shared_are_told_with_the_reason(look):
    problems, told = look("dpo", ROWS, shared_prompt="false")
    assert problems == []
    assert "a prompt is computed once for each answer: `shared_prompt` is false" in told


@pytest.mark.parametrize(("rows", "token"), [(ROWS, "<|endoftext|>"), (make_rows(), "<|im_end|>")])
def test_a_padding_token_that_ends_answers_is_found_for_a_reward_model(look, rows, token):
    problems, _ = look("reward", rows, pad_token=token)
    assert [problem.where for problem in problems] == ["pad_token"]
    assert "read the score before the end" in problems[0].found
    assert look("dpo", ROWS, pad_token="<|endoftext|>")[0] == []


def test_broken_rows_are_named(look):
    problems, told = look("dpo", [*ROWS, {"prompt": "a", "chosen": "b", "rejected": "b"}])
    assert "rows.jsonl:13" in problems[0].where
    assert "has no preference" in problems[0].remedy
    assert "✗ data" in told

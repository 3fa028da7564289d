"""``recipes check`` of recipes that train on preference pairs."""

from __future__ import annotations

import re
import shutil

import pytest
from tests.recipes.preferences import make_rows
from tests.rows import write_rows
from transformers import MistralConfig, MistralForCausalLM
from trl import DPOConfig

ROWS = [
    {"prompt": f"What is {n} plus {n}? " * 3, "chosen": f"It is {2 * n}.", "rejected": f"Maybe {n}, who knows."}
    for n in range(12)
]


@pytest.mark.parametrize("recipe", ["reward", "dpo"])
def test_valid_run_is_ready_with_figures_of_rows(run_check, recipe):
    problems, output = run_check(recipe, ROWS, test_split_size=2, per_device_train_batch_size=2)
    assert problems == []
    assert "rows.jsonl: `preference` layout, from chosen, rejected, prompt" in output
    assert "10 pairs under 10 prompts" in output
    assert "held out: 2 pairs" in output
    assert "5 steps, 1.00 epochs" in output
    assert "a prompt is computed once for both answers, which saves" in output
    assert output.endswith("ready to train\n")


def test_steps_count_replayed_pairs(run_check, tmp_path):
    """As in training: with two thirds of each epoch replayed, it has three times as many pairs."""
    old = write_rows(tmp_path / "old.jsonl", [{**row, "prompt": f"Before {at}?"} for at, row in enumerate(ROWS)])
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    assert "6 steps, 1.00 epochs" in run_check("dpo", ROWS, **keys)[1]
    problems, output = run_check("dpo", ROWS, replay_dataset=old, replay_share=2 / 3, **keys)
    assert not problems, problems
    assert "18 steps, 1.00 epochs" in output


def test_learning_rates_and_groups_are_those_of_recipe(run_check):
    """Without `learning_rate`, a preference recipe has the default of its TRL config class, not that of SFT."""
    rate = DPOConfig(output_dir="out", bf16=False).learning_rate
    _, output = run_check("dpo", ROWS, bf16="false", lr_scheduler_type="constant")
    assert f"learning rate at 0, 25, 50, 75, 100 %: {', '.join([f'{rate:.2e}'] * 5)}" in output
    assert set(re.findall("rate ([0-9.e-]+):", output)) == {f"{rate:.1e}"}


def test_unshared_prompts_are_reported_with_reason(run_check):
    problems, output = run_check("dpo", ROWS, shared_prompt="false")
    assert problems == []
    assert "a prompt is computed once for each answer: `shared_prompt` is false" in output


def test_required_sharing_is_refused_as_by_training(run_check, tmp_path, tiny_tokenizer_dir):
    folder = shutil.copytree(tiny_tokenizer_dir, tmp_path / "windowed")
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8)).save_pretrained(folder)
    assert run_check("dpo", ROWS, model_name_or_path=folder)[0] == []
    problems, _ = run_check("dpo", ROWS, model_name_or_path=folder, shared_prompt="true")
    assert ["prompts cannot be shared: a mistral model sees 8 tokens" in one.found for one in problems] == [True]


@pytest.mark.parametrize(("rows", "token"), [(ROWS, "<|endoftext|>"), (make_rows(), "<|im_end|>")])
def test_pad_token_that_ends_answers_is_reported_for_reward_model(run_check, rows, token):
    problems, _ = run_check("reward", rows, pad_token=token)
    assert [problem.where for problem in problems] == ["pad_token"]
    assert "read the score before the end" in problems[0].found
    assert run_check("dpo", ROWS, pad_token="<|endoftext|>")[0] == []


def test_broken_rows_are_reported(run_check):
    problems, output = run_check("dpo", [*ROWS, {"prompt": "a", "chosen": "b", "rejected": "b"}])
    assert "rows.jsonl:13" in problems[0].where
    assert "has no preference" in problems[0].remedy
    assert "✗ data" in output
    assert "answers end with" not in output  # Unknown.

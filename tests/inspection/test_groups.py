"""`recipes check` of RLOO and GRPO: prompts, rewards, and answers in groups."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.rows import write_rows

from recipes_lib.commands.check import check
from recipes_lib.config.loader import load_config
from recipes_lib.training.layouts.launch_environment import plan_launch


@pytest.fixture
def look(tiny_model_dir, tmp_path):
    rows = [{"question": f"{n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
    write_rows(tmp_path / "prompts.jsonl", rows)

    def run(recipe, num_processes=1, **keys):
        given = {
            "model_name_or_path": tiny_model_dir,
            "dataset_name": tmp_path / "prompts.jsonl",
            "output_dir": tmp_path / "out",
            "reward_funcs": "[recipes_lib.rl.verifiers:final_number]",
            "bf16": False,
            **keys,
        }
        config = load_config(recipe, [f"--{name}={value}" for name, value in given.items()])
        console = Console(file=io.StringIO(), width=200)
        return check(config, plan_launch(None, num_processes), console), console.file.getvalue()

    return run


def test_a_sound_run_is_told_in_answers_and_steps(look):
    problems, told = look("rloo", num_generations=4, gradient_accumulation_steps=2)
    assert not problems
    assert "reward: 1 final_number" in told
    assert "16 answers to 4 prompts at a time, 16 a step: 5 steps, 1 epochs" in told


def test_groups_that_do_not_share_out_are_found(look):
    problems, _ = look("grpo", num_generations=3)
    assert ["num_generations" in problem.found for problem in problems] == [True]

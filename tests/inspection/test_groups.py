"""``recipes check`` of RLOO and GRPO: prompts, rewards, and groups of answers."""

from __future__ import annotations

import pytest

ROWS = [{"question": f"{n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
KEYS = {"reward_funcs": "[recipes_lib.rl.verifiers:final_number]", "bf16": False}


def test_valid_run_is_described_in_answers_and_steps(run_check):
    problems, output = run_check("rloo", ROWS, num_generations=4, gradient_accumulation_steps=2, **KEYS)
    assert not problems
    assert "reward: 1 final_number" in output
    assert "16 answers to 4 prompts at a time, 16 a step: 5 steps, 1 epochs" in output


@pytest.mark.parametrize("num_unread", [0, 3, 20])
def test_right_answers_that_verifier_cannot_read_are_reported(run_check, num_unread):
    rows = [{**row, "answer": "1/4"} if number < num_unread else row for number, row in enumerate(ROWS)]
    problems, output = run_check("grpo", rows, num_generations=4, **KEYS)
    found = f"final_number reads no right answer in {num_unread} of the first 20 prompts"
    assert [found in problem.found for problem in problems] == [True] * (num_unread == 20)
    assert (f"warning: {found}" in output) == (num_unread == 3)


@pytest.mark.parametrize(("solution", "is_read"), [(r"\frac{1}{4}", True), ('["4"]', False)])
def test_solutions_that_math_verify_cannot_read_are_reported(run_check, solution, is_read):
    pytest.importorskip("math_verify")
    rows = [{"question": row["question"], "solution": solution} for row in ROWS]
    verifier = {"reward_funcs": "[trl.rewards:accuracy_reward]", "bf16": False}
    problems, _ = run_check("grpo", rows, num_generations=4, **verifier)
    assert ["accuracy_reward reads no right answer" in problem.found for problem in problems] == [True] * (not is_read)


def test_indivisible_groups_are_reported(run_check):
    problems, _ = run_check("grpo", ROWS, num_generations=3, **KEYS)
    assert ["num_generations" in problem.found for problem in problems] == [True]


@pytest.mark.parametrize(("tests", "is_valid"), [("assert add(1, 1) == 2", True), ('[{"input": "1"}]', False)])
def test_tests_that_check_nothing_are_reported(run_check, tests, is_valid):
    rows = [{**row, "tests": tests} for row in ROWS]
    verifier = {"reward_funcs": "[recipes_lib.rl.verifiers:python_tests]", "bf16": False}
    problems, _ = run_check("grpo", rows, num_generations=4, **verifier)
    assert ["tests have no assertion" in problem.found for problem in problems] == [True] * (not is_valid)

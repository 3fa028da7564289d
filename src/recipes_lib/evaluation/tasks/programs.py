"""Scores of programs that a model wrote; the task files beside this one name the functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes_lib.sandbox import run_program


def score_completion(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 for a function whose end the model wrote if it passes the tests of the problem (HumanEval)."""
    tests = f"{doc['test']}\ncheck({doc['entry_point']})"
    return {"pass@1": float(run_program(f"{doc['prompt']}{results[0]}\n{tests}\n").outcome == "passed")}


def score_answer(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 for a whole program, in a code block or bare, if it passes the assertions of the problem (MBPP)."""
    program = results[0]
    if "```" in program:
        program = program.split("```")[1].removeprefix("python")
    source = "\n".join([program, doc.get("test_setup_code") or "", *doc["test_list"]])
    return {"pass@1": float(run_program(source).outcome == "passed")}

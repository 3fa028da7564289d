"""Scores of generated programs, for the task files in this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes_lib.sandbox import run_program


def score_completion(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return ``pass@1`` of a completed function on the problem's tests (HumanEval): 1 if it passes, else 0."""
    tests = f"{doc['test']}\ncheck({doc['entry_point']})"
    return {"pass@1": float(run_program(f"{doc['prompt']}{results[0]}\n{tests}\n").outcome == "passed")}


def score_block(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return ``score_completion`` of a function that is completed in a code block, up to the end of the block."""
    return score_completion(doc, [results[0].partition("```")[0]])


def choose_examples(docs: Any) -> Any:
    """Return the examples of MBPP's prompt split from task 2 on: its paper shows tasks 2, 3 and 4."""
    return docs.filter(lambda doc: doc["task_id"] > 1)


def score_answer(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return ``pass@1`` of a program, which may be in a code block, on the problem's assertions (MBPP)."""
    # With any language after the opening fence, and closed or not.
    block = re.search(r"```(?:[\w+-]*\n|python)?(.*?)(?:```|\Z)", results[0], re.DOTALL)
    program = block[1] if block else results[0]
    source = "\n".join([program, doc.get("test_setup_code") or "", *doc["test_list"]])
    return {"pass@1": float(run_program(source).outcome == "passed")}

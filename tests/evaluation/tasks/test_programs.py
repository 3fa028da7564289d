"""Scores of programs in the layouts of HumanEval and MBPP."""

from __future__ import annotations

from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from recipes_lib.evaluation.suites import OWN_TASKS
from recipes_lib.evaluation.tasks.programs import score_answer, score_block, score_completion

PROBLEM = {
    "prompt": "def add(a, b):\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5",
    "entry_point": "add",
}
ASSERTIONS = {"test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"], "test_setup_code": ""}


@pytest.mark.parametrize(
    ("body", "score"), [("    return a + b", 1.0), ("    return a * b", 0.0), ("    return", 0.0), ("    exit()", 0.0)]
)
def test_score_completion(body: str, score: float) -> None:
    assert score_completion(PROBLEM, [body]) == {"pass@1": score}


@pytest.mark.parametrize(
    ("end", "score"), [("", 1.0), ("\n```", 1.0), ("\n```\nIt adds.\n```", 1.0), ("\nIt adds.", 0.0)]
)
def test_score_block_ends_with_the_block(end: str, score: float) -> None:
    assert score_block(PROBLEM, [f"    return a + b{end}"]) == {"pass@1": score}


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct"])
def test_humaneval_asks_as_lm_eval(name: str) -> None:
    folder = Path(lm_eval.tasks.__file__).with_name("humaneval")
    theirs, own = (
        load_yaml(path, resolve_func=False) for path in (folder / f"{name}.yaml", OWN_TASKS / f"{name}_sandboxed.yaml")
    )
    scoring = ("task", "metric_list", "process_results", "filter_list", "repeats")
    asked, expected = ({key: value for key, value in task.items() if key not in scoring} for task in (own, theirs))
    assert asked == expected


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("def add(a, b):\n    return a + b\n", 1.0),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1.0),
        ("```\ndef add(a, b):\n    return a - b\n```", 0.0),
        ("```py\ndef add(a, b):\n    return a + b\n```\n```\nadd(1, 2)\n```", 1.0),
        ("```Python3\ndef add(a, b):\n    return a + b\n", 1.0),
        ("```add = lambda a, b: a + b```", 1.0),
        ("I cannot.", 0.0),
    ],
)
def test_score_answer_extracts_program(answer: str, score: float) -> None:
    assert score_answer(ASSERTIONS, [answer]) == {"pass@1": score}

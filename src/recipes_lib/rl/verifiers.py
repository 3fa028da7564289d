"""Verifiable rewards for ``reward_funcs``: correctness of answers, without their reasoning in ``<think>``."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.evaluation.endpoint import split_reasoning
from recipes_lib.processes import count_cores
from recipes_lib.sandbox import run_program

Completion = str | Sequence[dict[str, Any]]
"""Answer as passed to a reward function: a text, or a chat of one message."""
Accepted = str | float | None | list[str] | list[float]
"""Right answer of a row, or a list of all that are accepted, as in Natural Questions."""
SECONDS_TO_RUN: Final = 10.0
"""Time limit in seconds of wall time for a program with its tests."""
_CODE: Final = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
"""Fenced blocks of any language: if some were skipped, their closing fences would be read as opening ones."""


def exact_match(*, completions: Sequence[Completion], solution: Sequence[Accepted], **_: Any) -> list[float | None]:
    """Return 1 if an answer equals the row's ``solution``, or one in its list, up to surrounding white space, else 0.

    The number 7.0 equals ``7`` too. Rows without a solution give ``None``; so do blank ones, which would reward empty
    answers.
    """
    scores: list[float | None] = []
    for completion, accepted in zip(completions, solution, strict=True):
        values = _list_accepted(accepted)
        # One fraction in a column makes floats of all its integers.
        whole = {_write(value).removesuffix(".0") for value in values if isinstance(value, float)}
        wanted = ({_write(value).strip() for value in values} | whole) - {""}
        scores.append(float(_read_text(completion).strip() in wanted) if wanted else None)
    return scores


def final_number(*, completions: Sequence[Completion], answer: Sequence[Accepted], **_: Any) -> list[float | None]:
    """Return 1 if the final number of an answer equals that of the row's ``answer``, or of one in its list, else 0.

    The column is a text as in GSM8K, or a number; rows without a number give ``None``, as do those with an expression
    such as ``3/4``. ``read_final_number`` defines the final number.
    """
    scores: list[float | None] = []
    for completion, accepted in zip(completions, answer, strict=True):
        wanted = {read_final_number(_write(value), is_reference=True) for value in _list_accepted(accepted)} - {None}
        scores.append(float(read_final_number(_read_text(completion)) in wanted) if wanted else None)
    return scores


def python_tests(
    *, completions: Sequence[Completion], tests: Sequence[str | Sequence[str] | None], **_: Any
) -> list[float | None]:
    """Return 1 if the Python program of an answer passes the row's ``tests``, else 0; ``None`` without tests.

    The program is the last fenced block of the answer, or the whole answer without a block. Tests are code (a string or
    a list of lines such as assertions), appended to the program. Both run in the sandbox, with one process per core.

    Raises:
        TypeError: Tests check nothing, so that every program that runs would pass them: JSON, such as inputs and
            outputs, or functions and classes that are not called.
    """

    def score(pair: tuple[Completion, str | Sequence[str] | None]) -> float | None:
        completion, lines = pair[0], [pair[1]] if isinstance(pair[1], str) else pair[1] or []
        if not any(map(str.strip, lines)):
            return None
        code = "\n".join(lines)
        with suppress(SyntaxError):  # No program passes such tests.
            if not any(map(_checks, ast.parse(code).body)):
                raise TypeError(f"tests have no assertion or call that is executed: {code:.80}")
        if not (program := read_program(_read_text(completion))).strip():
            return 0.0
        return float(run_program(f"{program}\n{code}", seconds=SECONDS_TO_RUN).outcome == "passed")

    with ThreadPoolExecutor(count_cores()) as pool:
        return list(pool.map(score, zip(completions, tests, strict=True)))


def read_program(text: str) -> str:
    """Return the last fenced block of an answer, or the whole answer without a block."""
    blocks: list[str] = _CODE.findall(text)
    return blocks[-1] if blocks else text


def _checks(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_definition and any(isinstance(node, ast.Assert | ast.Call) for node in ast.walk(statement))


def _list_accepted(value: Accepted) -> Sequence[str | float | None]:
    return value if isinstance(value, list | tuple) else [value]


def _write(value: str | float | None) -> str:
    """Return a column's value as text, numbers without exponent, because ``1e+20`` would be read as 20.

    Raises:
        TypeError: It is neither a text nor a number.
    """
    if isinstance(value, str):
        return value
    # pandas has NaN for no value.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError(f"a right answer is a text or a number, not {value!r:.80}")
    return f"{Decimal(str(value)):f}"


def _read_text(completion: Completion) -> str:
    """Return an answer without reasoning: one that was cut inside its reasoning has not been given."""
    return split_reasoning(completion if isinstance(completion, str) else str(completion[0]["content"]))[1]

"""Verifiable rewards for ``reward_funcs``: correctness of answers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.sandbox import run_program

Completion = str | Sequence[dict[str, Any]]
"""An answer as a reward function gets it: a text, or a chat of one message."""
SECONDS_TO_RUN: Final = 10.0
"""Of wall time for a program with its tests."""
_CODE: Final = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def exact_match(*, completions: Sequence[Completion], solution: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 if an answer equals the row's ``solution`` except for white space at its ends, else 0; ``None`` without one."""
    pairs = zip(map(_read_text, completions), solution, strict=True)
    return [None if wanted is None else float(text.strip() == wanted.strip()) for text, wanted in pairs]


def final_number(*, completions: Sequence[Completion], answer: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 if the final number of an answer equals that of the row's ``answer``, else 0; ``None`` if that has no number.

    The column is that of GSM8K; ``read_final_number`` defines the final number.
    """
    wanted = [None if text is None else read_final_number(text) for text in answer]
    given = [read_final_number(_read_text(completion)) for completion in completions]
    return [None if w is None else float(g == w) for g, w in zip(given, wanted, strict=True)]


def python_tests(
    *, completions: Sequence[Completion], tests: Sequence[str | Sequence[str] | None], **_: Any
) -> list[float | None]:
    """1 if the Python program of an answer passes the row's ``tests``, else 0; ``None`` without tests.

    The program is the last fenced block of the answer, or the whole answer without a block. Tests are code (a string or
    a list of lines such as assertions), appended to the program. Both run in the sandbox, with one process per core.
    """
    programs = [
        None if wanted is None else "\n".join([read_program(_read_text(completion)), *_list_lines(wanted)])
        for completion, wanted in zip(completions, tests, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_run, programs))


def read_program(text: str) -> str:
    """The last fenced block of an answer, or the whole answer without a block."""
    blocks: list[str] = _CODE.findall(text)
    return blocks[-1] if blocks else text


def _list_lines(tests: str | Sequence[str]) -> Sequence[str]:
    return [tests] if isinstance(tests, str) else tests


def _run(program: str | None) -> float | None:
    return None if program is None else float(run_program(program, seconds=SECONDS_TO_RUN).outcome == "passed")


def _read_text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])

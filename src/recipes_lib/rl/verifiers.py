"""Verifiable rewards for ``reward_funcs``: answers that are right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.data.final_numbers import read_final_number

Completion = str | Sequence[dict[str, Any]]
"""An answer as a reward function gets it: a text, or a chat of one message."""


def exact_match(*, completions: Sequence[Completion], solution: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 where an answer is the row's ``solution`` but for blanks at its ends, else 0; ``None`` where there is none."""
    pairs = zip(map(_read_text, completions), solution, strict=True)
    return [None if wanted is None else float(text.strip() == wanted.strip()) for text, wanted in pairs]


def final_number(*, completions: Sequence[Completion], answer: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 where an answer ends on the number that the row's ``answer`` ends on, else 0; ``None`` where that has none.

    As in GSM8K, whose rows have that column; which number that is: ``read_final_number``.
    """
    wanted = [None if text is None else read_final_number(text) for text in answer]
    given = [read_final_number(_read_text(completion)) for completion in completions]
    return [None if w is None else float(g == w) for g, w in zip(given, wanted, strict=True)]


def _read_text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])

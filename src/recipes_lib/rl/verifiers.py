"""Rewards that can be checked: functions for ``reward_funcs`` where an answer is right or wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

Completion = str | Sequence[dict[str, Any]]
"""An answer as a reward function gets it: a text, or a chat of one message."""

# A sign after a digit or a bracket is a subtraction, and a full stop that no digit follows ends the sentence.
_NUMBER: Final = re.compile(r"(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def exact_match(*, completions: Sequence[Completion], solution: Sequence[str], **_: Any) -> list[float]:
    """1 where an answer is the row's ``solution`` but for blanks at its ends, else 0."""
    pairs = zip(map(_read_text, completions), solution, strict=True)
    return [float(text.strip() == wanted.strip()) for text, wanted in pairs]


def final_number(*, completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float | None]:
    """1 where an answer ends on the number that the row's ``answer`` ends on, else 0; ``None`` where that has none.

    As in GSM8K, whose rows have that column, it is the number after the last ``####``; without that mark the last one.
    """
    wanted = [_read_number(text) for text in answer]
    given = [_read_number(_read_text(completion)) for completion in completions]
    return [None if w is None else float(g == w) for g, w in zip(given, wanted, strict=True)]


def _read_number(text: str) -> Decimal | None:
    _, mark, behind = text.rpartition("####")
    found = _NUMBER.findall(behind)
    return Decimal(found[0 if mark else -1].replace(",", "")) if found else None


def _read_text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])

"""Extraction of the final number of an answer, for exact-match metrics and verifiable rewards."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_MINUS: Final = "\u2212"
"""MINUS SIGN of Unicode, which models write besides the ASCII hyphen-minus."""
_THOUSANDS: Final = r"(?:,\\!|\{,\}|\\,|,)"
"""A comma, also as `,\\!`, `{,}` or `\\,` of LaTeX."""
# A minus after a digit or a bracket is a subtraction, not a sign; a dollar sign may follow it. A full stop is a decimal
# point only before a digit, and at the start of a number (`.5`) only if no word, bracket or full stop precedes it.
_NUMBER: Final = re.compile(
    rf"(?:(?<![\d)])[-{_MINUS}]\\?\$?)?(?:(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)"
)
# What is before or after a number inside an expression: a fraction, power, root, tuple, interval, matrix, time,
# `2x + 1` or `1e-5`. An equals sign, `\boxed{`, `\(`, `\%` and units that are words are no expressions.
_BEFORE: Final = re.compile(rf"(?:[a-zA-Z]|(?:[-{_MINUS}+/^_<>±√≤≥]|(?<!boxed)\{{|(?<!\\)[(\[]|\d[,:]|\\\\)\s*)$")
_AFTER: Final = re.compile(rf"[a-zA-Z]\b|\s*(?:[-{_MINUS}+/^_<>±√π≤≥!)\]]|\\(?!text|mathrm)[a-zA-Z\\])")


def read_final_number(text: str, *, is_reference: bool = False) -> Decimal | None:
    """Return the number after the last ``####``, GSM8K's mark of the answer; without such a mark, the last number.

    Commas may separate thousands, also LaTeX's ``1{,}000``; ``.5`` is 0.5, ``-$5`` is -5; the Unicode minus sign is
    accepted. ``None`` if there is no number.

    Args:
        text: An answer.
        is_reference: Whether it is the right answer: then a number inside an expression, such as ``3/4``, gives
            ``None``, because it does not tell the expression from wrong ones, such as ``1/4``.

    Source: ``tests/data/test_final_numbers.py``.
    """
    _, mark, rest = text.rpartition("####")
    found = list(_NUMBER.finditer(rest))
    number = found[0 if mark else -1] if found else None
    if not number or (is_reference and (_BEFORE.search(rest, 0, number.start()) or _AFTER.match(rest, number.end()))):
        return None
    return Decimal(re.sub(r"[^\d.-]", "", number[0].replace(_MINUS, "-")))

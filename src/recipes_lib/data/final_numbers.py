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
# An exponent is none of the numbers: that of `cm^2` would hide the area.
_NUMBER: Final = re.compile(
    rf"\^\{{?[-{_MINUS}]?[\d.]+|((?:(?<![\d)])[-{_MINUS}]\\?\$?)?"
    rf"(?:(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+))"
)
_BOXED: Final = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)")
# What is before or after a number inside an expression: a fraction, power, root, tuple, interval, matrix, time,
# `2x + 1` or `1e-5`. An equals sign, `\(`, `\%`, degrees, and units that are words or their powers are no expressions.
_BEFORE: Final = re.compile(rf"(?:[a-zA-Z]|(?:[-{_MINUS}+/^_<>±√≤≥]|\{{|(?<!\\)[(\[]|\d[,:]|\\\\)\s*)$")
_AFTER: Final = re.compile(
    rf"[a-zA-Z]\b|\s*(?:[-{_MINUS}+/_<>±√π≤≥!)\]]|\^(?!\{{?\\circ)|\\(?!text|mathrm|mbox)[a-zA-Z\\])"
)


def read_final_number(text: str, *, is_reference: bool = False) -> Decimal | None:
    r"""Return the number in the last ``\boxed{}``, or after a later ``####`` (GSM8K); without either, the last number.

    Commas may separate thousands, also LaTeX's ``1{,}000``; ``.5`` is 0.5, ``-$5`` is -5; the Unicode minus sign is
    accepted. ``None`` if there is no number, or if that in the box is inside an expression, such as ``3/4``.

    Args:
        text: An answer.
        is_reference: Whether it is the right answer: then a number inside an expression gives ``None`` without a box
            too, because it does not tell the expression from wrong ones, such as ``1/4``.

    Source: ``tests/data/test_final_numbers.py``.
    """
    _, mark, rest = text.rpartition("####")
    boxed = _BOXED.findall(rest)
    found = [number for number in _NUMBER.finditer(boxed[-1] if boxed else rest) if number[1]]
    number = found[0 if mark and not boxed else -1] if found else None
    if not number or ((is_reference or boxed) and _is_inside_expression(number)):
        return None
    return Decimal(re.sub(r"[^\d.-]", "", number[0].replace(_MINUS, "-")))


def _is_inside_expression(number: re.Match[str]) -> bool:
    return bool(_BEFORE.search(number.string, 0, number.start()) or _AFTER.match(number.string, number.end()))

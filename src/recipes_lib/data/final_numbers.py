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


def read_final_number(text: str) -> Decimal | None:
    """Return the number after the last ``####``, GSM8K's mark of the answer; without such a mark, the last number.

    Commas may separate thousands, also LaTeX's ``1{,}000``; ``.5`` is 0.5, ``-$5`` is -5; the Unicode minus sign is
    accepted. ``None`` if there is no number.

    Source: ``tests/data/test_final_numbers.py``.
    """
    _, mark, rest = text.rpartition("####")
    found = _NUMBER.findall(rest)
    return Decimal(re.sub(r"[^\d.-]", "", found[0 if mark else -1].replace(_MINUS, "-"))) if found else None

"""The final number of an answer, for exact-match metrics and verifiable rewards."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_MINUS: Final = "\u2212"
"""The minus sign of typeset mathematics, which language models write as well as the hyphen."""
# A sign after a digit or a bracket is a subtraction, and a full stop that no digit follows ends the sentence. So does
# one right after a word, a bracket or another stop: it is no decimal point that has lost its 0.
_NUMBER: Final = re.compile(
    rf"(?:(?<![\d)])[-{_MINUS}])?(?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)"
)


def read_final_number(text: str) -> Decimal | None:
    """Return the number after the last ``####``, as GSM8K marks it; without that mark, the last number.

    ``None`` if there is none. Thousands may have commas; ``.5`` is 0.5, and the Unicode minus sign is a sign.

    Source: ``tests/data/test_final_numbers.py``.
    """
    _, mark, behind = text.rpartition("####")
    found = _NUMBER.findall(behind)
    return Decimal(found[0 if mark else -1].replace(",", "").replace(_MINUS, "-")) if found else None

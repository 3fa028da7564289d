"""Extraction of the final number of an answer, for exact-match metrics and verifiable rewards."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_MINUS: Final = "\u2212\u2013"
"""Minus sign of Unicode and en dash, which models write besides the ASCII hyphen-minus."""
_THOUSANDS: Final = r"(?:,\\!|\{,\}|\\[, ]|[,'’ \u00a0\u2009\u202f])"
"""A comma, apostrophe (`1'000`) or space, also as `,\\!`, `{,}`, `\\,` or `\\ ` of LaTeX."""
# A minus after a digit or a bracket is a subtraction, not a sign; a dollar sign may follow it. A full stop is a decimal
# point only before a digit, and at the start of a number (`.5`) only if no word, bracket or full stop precedes it.
# An exponent is none of the numbers: that of `cm^2` or `cm2` would hide the area.
_NUMBER: Final = re.compile(
    rf"\^\{{?[-{_MINUS}]?[\d.]+|(?<=[mO])[23](?![\d.,]?\d)|((?:(?<![\d)])[-{_MINUS}]\\?\$?)?"
    rf"(?:(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+))"
)
# What precedes a part of an expression in any text: an operand and an operator, as in `3/4`, `1 + 2` or `2024-05-01`; a
# decimal comma (`1.000,5`), `10.5.3`, `3:4` or `1e3`; a tuple, fraction or root. ` - ` may be a dash, `* ` a bullet.
_JOINED: Final = re.compile(
    rf"(?:[\d)}}](?:[-{_MINUS}]| ?(?:[+/⁄∕×÷·⋅]|\*\*?|\\times|\\cdot|\\div) ?)\\?\$?|\d[.,:eE]|[(\[][^()\[\]]*\d, "
    r"|(?:frac|sqrt)[^a-zA-Z=\s]*|√|(?:±|\\pm|\\mp) ?)$"
)
_BOXED: Final = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)")
# What is before or after a number inside an expression that is the whole answer: also a bracket, interval, matrix or
# `2x + 1`. An equals sign, `\(`, `\%`, degrees, and units that are words or their powers are no expressions.
_BEFORE: Final = re.compile(
    rf"(?:[a-zA-Z]|(?:[-{_MINUS}+/^_<>±√≤≥≠]|\{{|(?<!\\)[(\[]|\d[,:]|\\\\"
    r"|\\(?:[lgn]eq?|[lg]t|neg|log\S*|ln|sin|cos|tan))\s*)$"
)
_AFTER: Final = re.compile(
    rf"[a-zA-Z]\b|\s*(?:[-{_MINUS}+/_<>±√π≤≥!)\]…]|\.\.|[*×÷:,]?\s?\d|\\(?!circ|degree|quad)[a-zA-Z\\])"
)
_TEXT: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
_VALUE: Final = re.compile(r"=[^=\d]*\d[^=\s,;]*\s*(?:[,;]|and|or)")
"""A value of several, as in `x = 2 or x = 3`."""
_MAX_ANSWER: Final = 40
"""Characters of the longest answer; a longer text is a solution, in which other numbers precede that of the answer."""
_HEADING: Final = re.compile(r"\W*+(?:(?:Step|Part|Case|Method)\b|\D*$)", re.IGNORECASE)
"""A heading of Markdown, such as `#### Step 2` or `#### Conclusion`, instead of an answer after the mark."""
_POWER: Final = re.compile(r"\s?\^(?!\{?\\circ)|[²³⁰-⁹⁻¼-¾⅐-⅞⁄∕·⋅]")
_MULTIPLE: Final = re.compile(r"\s*(?:hundred|thousand|[mbtr]+illion|[万萬亿億千百])")
_WRAPPED: Final = re.compile(
    rf"((?:^|=)[\s$]*)(?:\+|(?:\\left)?\(\+?([-{_MINUS}]?\d*\.?\d+)(?:\\right)?\)(?=[\s$.]*$))"
)
"""The sign of `+5` and the brackets of `(5)`, if that is all, or the value after an equals sign."""


def read_final_number(text: str, *, is_reference: bool = False) -> Decimal | None:
    r"""Return the number in the last ``\boxed{}``, or after a later ``####`` (GSM8K); without either, the last number.

    Commas, apostrophes or spaces may separate thousands, also LaTeX's ``1{,}000``; ``.5`` is 0.5, ``-$5`` is -5, and
    ``+5`` and ``(5)`` are 5; the Unicode minus sign is accepted. ``None`` if there is no number, or if it is part of an
    expression, such as ``3/4``, which would make ``1/4`` equal to it. In a box, several values are one too, as in ``2
    or 3``.

    Args:
        text: An answer.
        is_reference: Whether it is the right answer: it is then part of an expression as strictly as in a box, but in
            a text of more than 40 characters may follow other numbers.

    Source: ``tests/data/test_final_numbers.py``.
    """
    _, mark, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0]
    is_heading = _HEADING.match(line) is not None
    boxed = _BOXED.findall(text if is_heading else rest)
    is_marked = bool(mark and not boxed and not is_heading)
    text = boxed[-1] if boxed else line if is_marked else rest
    text = _WRAPPED.sub(r"\1\2", _TEXT.sub(r" \1 ", text))
    found = [number for number in _NUMBER.finditer(text) if number[1]]
    number = found[0 if is_marked else -1] if found else None
    if not number or _JOINED.search(text, 0, number.start()) or _POWER.match(text, number.end()):
        return None
    # In prose, brackets, hyphens and letters beside a number are punctuation and units.
    is_alone = is_reference or boxed or is_marked
    if is_alone and (_BEFORE.search(text, 0, number.start()) or _AFTER.match(text, number.end())):
        return None
    # Of an answer, `5 million` may be that to "how many millions".
    if is_reference and _MULTIPLE.match(text, number.end()):
        return None
    before, is_answer = text[: number.start()], boxed or (is_reference and not is_marked and len(text) <= _MAX_ANSWER)
    if is_answer and (re.search(r"\d", before.rpartition("=")[2]) or _VALUE.search(before)):
        return None
    return Decimal(re.sub(r"[^\d.-]", "", re.sub(f"[{_MINUS}]", "-", number[0])))

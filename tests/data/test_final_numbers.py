"""Parsing of the final number of a text, with separators, signs and decimal points."""

from __future__ import annotations

from decimal import Decimal

import pytest

from recipes_lib.data.final_numbers import read_final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48 + 24 = <<48+24=72>>72\n#### 72", "72"),
        ("#### 72 clips, not 96", "72"),
        ("72\n#### 96", "96"),
        ("72\n####", None),
        ("She sold 72 clips.", "72"),
        ("72 of 96", "96"),
        ("It is $72.00", "72"),
        ("seventy-two", None),
        ("", None),
        # Thousands.
        ("1,234 in all", "1234"),
        ("1,234,567.5", "1234567.5"),
        ("7,2", "2"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1,\!234\,567}", "1234567"),
        # Signs, and hyphens that are none.
        ("the loss is -72", "-72"),
        ("the loss is \u221272", "-72"),
        ("so 100-28 = 72.", "72"),
        ("100-72", "72"),
        ("100\u221272", "72"),
        ("(1+1)-2", "2"),
        ("x=-.5", "-0.5"),
        ("a loss of -$1,234.50", "-1234.5"),
        (r"a loss of $-\$72$", "-72"),
        ("$100-$28", "28"),
        # Decimal points, and full stops that are none.
        ("0.5", "0.5"),
        ("a half, .5", "0.5"),
        ("$.5 each", "0.5"),
        ("\u2212.25", "-0.25"),
        ("Right.72", "72"),
        ("see No.5", "5"),
        ("version 10.5.3", "3"),
        ("wait...5", "5"),
        ("(see above).5", "5"),
    ],
)
def test_read_final_number(text: str, number: str | None) -> None:
    assert read_final_number(text) == (None if number is None else Decimal(number))

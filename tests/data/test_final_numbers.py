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
        ("48 + 24\n#### Step 2: add\nThe sum is 72.", "72"),
        ("So \\boxed{72}\n#### Check\n24 < 96", "72"),
        ("24\n#### **Conclusion**\nThe sum is 72.", "72"),
        ("96\n#### seventy-two", None),
        ("She sold 72 clips.", "72"),
        ("72 of 96", "96"),
        ("It is $72.00", "72"),
        ("seventy-two", None),
        ("", None),
        # Thousands.
        ("1,234 in all", "1234"),
        ("1,234,567.5", "1234567.5"),
        ("7,2", None),
        ("1.000,5", None),
        ("1 234 567.5", "1234567.5"),
        ("12\u202f500 in all", "12500"),
        ("in 2024 300 of them", "300"),
        ("1'234'567 in all", "1234567"),
        (r"\boxed{10\ 000}", "10000"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1,\!234\,567}", "1234567"),
        # Marks of the answer, and text after it.
        (r"\boxed{72}. In 3 days it is more.", "72"),
        (r"\boxed{96}, no: \boxed{70 + 2 = 72\text{ cm}^2} in 3 days", "72"),
        ("#### 3. The total\n\\boxed{72}", "72"),
        ("\\boxed{96}\n#### 72", "72"),
        (r"\boxed{\frac{72}{96}}", None),
        (r"\boxed{(72, 96)}", None),
        (r"#### \boxed{12 \text{ or } 72}", None),
        (r"\boxed{12 = x, y = 72}", "72"),
        (r"\boxed{x = 12, y = 72}", None),
        (r"\boxed{\boxed{72}}", "72"),
        (r"\boxed{\text{72}}", "72"),
        # Parts of an expression in prose.
        ("It is 3/72.", None),
        ("It is 3 / 72", None),
        ("a ratio of 3:72", None),
        ("24 × 3", None),
        ("2**10", None),
        (r"so $3 \times 72$", None),
        (r"so $\frac{3}{72}$", None),
        (r"so $\sqrt{72}$", None),
        (r"so $\pm 72$", None),
        (r"so $\frac{144}{2} = 72$", "72"),
        ("the point (1, 72)", None),
        ("(1, 2) has the sum 72", "72"),
        ("1e3", None),
        ("3⁄72", None),
        ("3·72", None),
        ("72²", None),
        ("72½", None),
        ("about 3–72", None),
        ("2^10", None),
        ("72^\\circ", "72"),
        ("100-72", None),
        ("100\u221272", None),
        ("(1+1)-2", None),
        ("$100-$28", None),
        ("- 3 days\n* 72 clips", "72"),
        ("We sold **72** (see above)", "72"),
        # Exponents are no numbers of their own.
        ("an area of 72 m^2", "72"),
        ("an area of 72 cm2", "72"),
        ("72 kg of CO2.", "72"),
        (r"72 \text{ cm}^{2}", "72"),
        ("72 m s^-2 or so", "72"),
        # Signs, and hyphens that are none.
        ("the loss is -72", "-72"),
        ("the loss is –72", "-72"),
        # Signs and brackets that say nothing.
        (r"\boxed{+72}", "72"),
        (r"\boxed{x = +\$72}", "72"),
        (r"\boxed{(72)}", "72"),
        (r"\boxed{\left(-72\right)}", "-72"),
        ("#### +72", "72"),
        ("#### (72)", "72"),
        (r"\boxed{3 + 72}", None),
        (r"\boxed{(3)(72)}", None),
        (r"\boxed{f(72)}", None),
        (r"\boxed{(3,724)}", None),
        ("the loss is \u221272", "-72"),
        ("so 100-28 = 72.", "72"),
        ("Day 3 - 72 clips", "72"),
        ("x=-.5", "-0.5"),
        ("a loss of -$1,234.50", "-1234.5"),
        (r"a loss of $-\$72$", "-72"),
        # Decimal points, and full stops that are none.
        ("0.5", "0.5"),
        ("a half, .5", "0.5"),
        ("$.5 each", "0.5"),
        ("\u2212.25", "-0.25"),
        ("Right.72", "72"),
        ("see No.5", "5"),
        ("version 10.5.3", None),
        ("wait...5", "5"),
        ("(see above).5", "5"),
    ],
)
def test_read_final_number(text: str, number: str | None) -> None:
    assert read_final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("texts", "is_number"),
    [
        ("3/4|1 1/2|#### 3/4|2x + 1|x - 1|x^2+1|5x|x5|2^10|1e-5|3 − 5i|x > 5|x ≥ 5|5 < x|5!|(3, 5)|[1, 2]", False),
        (r"2^{10}|x_{10}|10^{-3}|\{1, 2\}|(-\infty, 5)|[5, \infty)|\frac{3}{4}|\frac12|\sqrt{2}|\sqrt 2\pi", False),
        (r"\pi/2|2\sqrt{3}|3 \pm \sqrt{5}|\begin{pmatrix} 1 \\ 2 \end{pmatrix}|5 \\ \end{pmatrix}", False),
        ("3:30|2024-05-01|√2|2√3|2π|-$5/4$|0.333...|0.3…", False),
        (r"\pm 3|x \le 5|5 \le x \le 7|x \neq 2|x ≠ 2|\log_2 8|\log 8|\ln 8|\sin 30|5²|5½|5⁄6|5·6", False),
        ("72|#### 72|6 + 66\n#### 72\nThe answer is: 72|-72|$-72$|$72|-$72|$72$|72.|72%|72°|x=72|x = -72", True),
        (r"72\%|$72\,$|\boxed{72}|$\boxed{72}$.|\(72\)|72 \text{ cm}|72\,\mathrm{cm}|\$72|70 + 2 = 72", True),
        (r"**72**|It is: 72|72 clips|72 cm|72 cm^2|72\text{ cm}^3|72\mbox{ cm}|72^\circ|72^{\circ}|(72)", True),
        (r"72\quad\text{cm}|72\degree", True),
    ],
)
def test_number_inside_an_expression_is_no_reference(texts: str, is_number: bool) -> None:
    """Else 1/4 would be right for 3/4."""
    for text in texts.split("|"):
        number = read_final_number(text, is_reference=True)
        assert (number is not None) == is_number, text
        if "#" not in text and "boxed" not in text:
            assert read_final_number(f"\\boxed{{{text}}}") == number, text
            assert read_final_number(f"#### {text}\n- 3 days") == (None if "+" in text else number), text


@pytest.mark.parametrize("text", ["5 million", r"\boxed{5\text{ thousand}}", "5万", "#### 5 billion"])
def test_multiple_is_no_reference(text: str) -> None:
    """Else 5 would be right, and 5,000,000 wrong; an answer may say the unit of "how many millions"."""
    assert read_final_number(text, is_reference=True) is None
    assert read_final_number(text) == 5


@pytest.mark.parametrize(
    "text",
    [
        r"2 and 3",
        r"10\text{ or }20",
        r"x = 2 or x = 3",
        r"x=2,\ y=3",
        r"13 out of 20",
        r"1 in 6",
        r"5 hours 30 minutes",
    ],
)
def test_several_values_are_no_reference(text: str) -> None:
    """Else 3 would be right for 2 and 3."""
    assert read_final_number(text, is_reference=True) is None
    assert read_final_number(f"\\boxed{{{text}}}") is None
    assert read_final_number("She sold 48 clips in April and 24 in May, 72 in all", is_reference=True) == 72


@pytest.mark.parametrize("piece", ["!", "$ ", "1,", r"\boxed{", r"\text{"])
def test_number_is_read_in_linear_time(piece: str) -> None:
    """As in the answers of a collapsed policy; in quadratic time each of the first two would take minutes."""
    assert read_final_number(piece * (100_000 // len(piece)) + " = 5") == 5

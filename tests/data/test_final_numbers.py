"""Parsing of the final number of a text, with separators, signs and decimal points."""

from __future__ import annotations

from decimal import Decimal

import pytest

from recipes_lib.data.final_numbers import read_final_number


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        ("72", "48 + 24 = <<48+24=72>>72\n#### 72|#### 72 clips, not 96|She sold 72 clips.|It is $72.00"),
        ("72", "48 + 24\n#### Step 2: add\nThe sum is 72.|24\n#### **Conclusion**\nThe sum is 72."),
        ("72", "So \\boxed{72}\n#### Check\n24 < 96"),
        ("96", "72\n#### 96|72 of 96"),
        (None, "|72\n####|96\n#### seventy-two|seventy-two"),
        # Thousands.
        ("1234", r"1,234 in all|\boxed{1{,}234}"),
        ("1234567", r"1'234'567 in all|\boxed{1,\!234\,567}"),
        ("1234567.5", "1,234,567.5|1 234 567.5"),
        ("12500", "12\u202f500 in all"),
        ("10000", r"\boxed{10\ 000}"),
        ("300", "in 2024 300 of them"),
        (None, "7,2|1.000,5"),
        # Marks of the answer, and text after it.
        ("72", r"\boxed{72}. In 3 days it is more.|\boxed{12 = x, y = 72}|\boxed{\boxed{72}}|\boxed{\text{72}}"),
        ("72", "#### 3. The total\n\\boxed{72}|\\boxed{96}\n#### 72"),
        ("72", r"\boxed{96}, no: \boxed{70 + 2 = 72\text{ cm}^2} in 3 days"),
        (None, r"\boxed{\frac{72}{96}}|\boxed{(72, 96)}|\boxed{12 \text{ or } 72}|\boxed{x = 12, y = 72}"),
        # Parts of an expression in prose.
        ("72", r"so $\frac{144}{2} = 72$|(1, 2) has the sum 72|72^\circ"),
        ("72", "- 3 days\n* 72 clips|We sold **72** (see above)"),
        (None, "It is 3/72.|It is 3 / 72|a ratio of 3:72|24 × 3|2**10|the point (1, 72)|1e3|3⁄72|3·72|72²|72½"),
        (None, r"so $3 \times 72$|so $\frac{3}{72}$|so $\sqrt{72}$|so $\pm 72$|2^10|(1+1)-2|$100-$28"),
        (None, "about 3–72|100-72|100\u221272"),
        # Exponents are no numbers of their own.
        ("72", r"an area of 72 m^2|an area of 72 cm2|72 kg of CO2.|72 \text{ cm}^{2}|72 m s^-2 or so"),
        # Signs, hyphens that are none, and signs and brackets that say nothing.
        ("-72", r"the loss is -72|the loss is –72|\boxed{\left(-72\right)}|a loss of $-\$72$"),
        ("-72", "the loss is \u221272"),
        ("72", r"\boxed{+72}|\boxed{x = +\$72}|\boxed{(72)}|#### +72|#### (72)|so 100-28 = 72.|Day 3 - 72 clips"),
        (None, r"\boxed{3 + 72}|\boxed{(3)(72)}|\boxed{f(72)}|\boxed{(3,724)}"),
        ("-0.5", "x=-.5"),
        ("-1234.5", "a loss of -$1,234.50"),
        # Decimal points, and full stops that are none.
        ("0.5", "0.5|a half, .5|$.5 each"),
        ("-0.25", "\u2212.25"),
        ("72", "Right.72"),
        ("5", "see No.5|wait...5|(see above).5"),
        (None, "version 10.5.3"),
    ],
)
def test_read_final_number(number: str | None, texts: str) -> None:
    for text in texts.split("|"):
        assert read_final_number(text) == (None if number is None else Decimal(number)), text


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

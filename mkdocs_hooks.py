"""Of ``make site``: formulas as MathML."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

MATH = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the formulas of a page, which are fences of the language ``math``."""
    return MATH.sub(lambda fence: f"<div>{convert(fence[1], display='block')}</div>", markdown)

"""Of ``make site``: formulas as MathML, and the titles of generated pages."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

GENERATED = re.compile(r"\A<!--.*?-->\s*")
MATH = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the formulas of a page, which are fences of the language ``math``, and drop a comment before its title.

    MkDocs takes the title of a page from its first line only, and otherwise names it after the file.
    """
    markdown = GENERATED.sub("", markdown)
    return MATH.sub(lambda fence: f"<div class='formula'>{convert(fence[1], display='block')}</div>", markdown)

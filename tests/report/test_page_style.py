"""Colours of the style sheet: themes, charts and contrast."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from recipes_lib.report.charts import COLOURS
from recipes_lib.report.page import build_report

STYLE = Path(inspect.getfile(build_report)).with_name("page.css").read_text()


def read_themes() -> list[dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, flags=re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_every_theme_defines_all_colours() -> None:
    light, dark, printed = read_themes()
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE)) | set(COLOURS)

    assert used == set(light) == set(dark) == set(printed)


@pytest.mark.parametrize(
    ("selector", "declaration"),
    [
        ("pre", "unicode-bidi: plaintext"),
        ("pre", "overflow-wrap: anywhere"),
        (".figures > div", "overflow-wrap: anywhere"),
    ],
)
def test_samples_keep_their_direction_and_long_words_wrap(selector: str, declaration: str) -> None:
    (rule,) = re.findall(rf"^{re.escape(selector)} \{{(.*?)\}}", STYLE, flags=re.DOTALL | re.MULTILINE)
    assert declaration in rule


def test_colours_of_the_light_theme_are_distinct() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_contrast_meets_wcag_in_every_theme() -> None:
    for theme in read_themes():
        for ground in ("page", "card", "warm"):
            assert contrast(theme["ink"], theme[ground]) >= 7
        for ground in ("page", "card"):
            assert contrast(theme["muted"], theme[ground]) >= 4.5
            for name in ("first", "second", "third", "alarm", "good"):
                # WCAG requires 4.5 for text and 3 for graphics.
                assert contrast(theme[name], theme[ground]) >= (4.5 if name in {"second", "good"} else 3)

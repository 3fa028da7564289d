"""Formats of counts (three digits), sizes and durations (the two largest units)."""

from __future__ import annotations

import pytest

from recipes_lib.quantities import format_bytes, format_count, format_duration, format_figure, pluralize


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((842, "842"), (12345, "12.3k"), (4.56e6, "4.56M"), (7e9, "7B"), (15.6e12, "15.6T"), (0, "0")),
        *((-12345, "-12.3k"), (999.4, "999"), (999.6, "1k"), (999_700, "1M")),
    ],
)
def test_format_count(number: float, expected: str) -> None:
    assert format_count(number) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 B"), (842, "842 B"), (12345, "12.3 kB"), (10.6e6, "10.6 MB"), (4.56e9, "4.56 GB"), (2e12, "2 TB")],
)
def test_format_bytes(number: float, expected: str) -> None:
    assert format_bytes(number) == expected


@pytest.mark.parametrize(("number", "expected"), [(1234.56, "1,234.6"), (1, "1.0"), (0.0321, "0.032"), (0, "0")])
def test_format_figure(number: float, expected: str) -> None:
    assert format_figure(number) == expected


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(1, "process", "1 process"), (0, "process", "0 processes"), (1, "step", "1 step"), (1200, "step", "1,200 steps")],
)
def test_pluralize(count: int, noun: str, expected: str) -> None:
    assert pluralize(count, noun) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "under 1 s"),
        (2.4, "2 s"),
        (59.6, "1 min 0 s"),
        (123, "2 min 3 s"),
        (3723, "1 h 2 min"),
        (9e4, "25 h 0 min"),
        (float("nan"), "unknown time"),
    ],
)
def test_format_duration(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected

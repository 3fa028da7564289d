"""Human-readable counts, sizes and durations, for terminals and reports."""

from __future__ import annotations

import math


def format_count(number: float) -> str:
    """Return a count in at most five characters: ``842``, ``12.3k``, ``4.56M``."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 0.9995: a number that rounds up to the scale with three digits; 999.6 would otherwise print as 1e+03.
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}"


def format_bytes(number: float) -> str:
    """Return a size in bytes with a decimal unit: ``842 B``, ``12.3 kB``, ``4.56 GB``."""
    # `rstrip`: the digits; counts have B for a billion.
    digits = (count := format_count(number)).rstrip("kMBT")
    return f"{digits} {count.removeprefix(digits).replace('B', 'G')}B"


def format_figure(number: float) -> str:
    """Return a number with one decimal, below 1 with two digits: ``1,234.5``, ``0.032``."""
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 process``, ``2 processes``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def format_duration(seconds: float) -> str:
    """Return a duration as ``1 h 2 min``, ``2 min 3 s`` or ``3 s``."""
    if not math.isfinite(seconds):
        return "unknown time"
    if seconds < 1:
        return "under 1 s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

"""When a loss or a gradient is a spike: far above what it has lately been, measured so that spikes do not hide it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WINDOW: Final = 50
"""Steps that a new one is held against."""
MIN_STEPS: Final = 20
"""Steps before the first judgement: a median deviation of fewer is too uncertain for the factor below."""
FACTOR: Final = 6.0
"""Standard deviations above the median, of normally distributed figures, at which one is a spike."""
MAD_TO_STD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 / Phi^-1(3/4)."""
FLOOR: Final = 0.02
"""Smallest deviation that counts, as a share of the median: a curve without noise is not judged by its last digits."""
UPPER_TO_STD: Final = 1 / statistics.NormalDist().inv_cdf(0.9)
"""Standard deviation of a normal distribution over the distance of its last decile from the median."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A figure out of the ordinary.

    Attributes:
        figure: ``loss`` or ``grad_norm``.
        value: What it was.
        median: Over the steps before.
        threshold: Above which it is a spike.
    """

    figure: str
    value: float
    median: float
    threshold: float

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.figure]
        return f"{name} {self.value:.4g}, where {self.threshold:.4g} is the limit and {self.median:.4g} the median"


class SpikeMonitor:
    """Holds the loss and the gradient norm of each step against the steps before.

    A figure is a spike when it exceeds ``median + 6 * 1.4826 * MAD`` of the last 50 steps, where the deviation counts
    for at least 2 % of the median. Unlike mean and variance, median and MAD are not moved by the spike itself, nor by
    the descent that came before. Norms of gradients, and losses while all are above 0, are judged by their logarithms:
    their noise multiplies, as that of a loss of pairs, of which few are left to learn. Other losses may be as skewed:
    their deviation is at least what the upper tenth of them tells. Where all that tells is 0, nothing is a spike.

    Source: ``tests/training/test_spikes.py``.
    """

    def __init__(self) -> None:
        """Start with no step."""
        self._windows: dict[str, deque[float]] = {}

    def judge(self, loss: float, grad_norm: float, kind: str = "") -> Spike | None:
        """Return what is a spike in a step, the loss first; then count the step among those that others are held to.

        Args:
            loss: Mean of the step, finite, of any sign.
            grad_norm: Before clipping, finite.
            kind: Of the step; it is held against those of its kind.
        """
        log_norm = math.log(max(grad_norm, 1e-30))
        losses, log_norms = (self._open(f"{kind}_{name}" if kind else name) for name in ("losses", "log_norms"))
        spike = _judge_loss(losses, loss)
        of_norm = _judge_logarithm("grad_norm", log_norms, log_norm)
        losses.append(loss)
        log_norms.append(log_norm)
        return spike or of_norm

    def export(self) -> dict[str, list[float]]:
        """Return what the next judgement depends on, as JSON values."""
        return {name: list(window) for name, window in self._windows.items()}

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Go on from what ``export`` returned; from no step where it is empty."""
        self._windows = {name: deque(window, maxlen=WINDOW) for name, window in exported.items()}

    def _open(self, name: str) -> deque[float]:
        return self._windows.setdefault(name, deque(maxlen=WINDOW))


def _judge_loss(before: Sequence[float], loss: float) -> Spike | None:
    if len(before) < MIN_STEPS:
        return None
    if min(*before, loss) > 0:
        return _judge_logarithm("loss", [math.log(earlier) for earlier in before], math.log(loss))
    median = statistics.median(before)
    upper = statistics.quantiles(before, n=10, method="inclusive")[-1]
    return _judge("loss", before, loss, max(FLOOR * abs(median), UPPER_TO_STD * (upper - median)))


def _judge_logarithm(figure: str, before: Sequence[float], value: float) -> Spike | None:
    """Judge by logarithms; what is told are the figures themselves."""
    # The logarithm of a ratio of 1.02.
    spike = _judge(figure, before, value, FLOOR)
    return spike and Spike(figure, *map(math.exp, (spike.value, spike.median, spike.threshold)))


def _judge(figure: str, before: Sequence[float], value: float, floor: float) -> Spike | None:
    if len(before) < MIN_STEPS:
        return None
    median = statistics.median(before)
    deviation = max(MAD_TO_STD * statistics.median(abs(earlier - median) for earlier in before), floor)
    threshold = median + FACTOR * deviation
    return Spike(figure, value, median, threshold) if deviation and value > threshold else None

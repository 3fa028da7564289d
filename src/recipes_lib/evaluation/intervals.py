"""Confidence intervals of mean paired differences."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

NUM_RESAMPLES: Final = 2000
_SEED: Final = 0
_FEWEST: Final = 6
"""Smallest number of questions with 2 / 2^n below 5 %."""


def compute_interval(differences: Any) -> tuple[float, float]:
    """Return a 95 % interval of the mean of paired differences that does not leave out 0 by too few questions.

    Of answers that are right or wrong: the hull of Bonett and Price's interval and of the exact one that belongs to
    McNemar's test, which leaves out 0 only where that test does. Of other scores: the hull of Student's and of the
    percentile bootstrap over questions, and all numbers below six, where no sign test reaches 5 %.

    Args:
        differences: ``(N,)``, a difference for each question.

    Source: Bonett and Price 2012; McNemar 1947 (``scipy.stats.binomtest``); Efron 1979. Coverage and the tests they
    stand for in ``tests/evaluation/test_intervals.py``.
    """
    from scipy import stats  # Takes a third of a second, which `recipes check --help` would wait for.

    number = len(differences)
    if number < 2:
        return -np.inf, np.inf
    if np.isin(differences, (-1, 0, 1)).all():
        return _bound_proportions(int((differences > 0).sum()), int((differences < 0).sum()), number)
    if number < _FEWEST:
        return -np.inf, np.inf
    draw = np.random.default_rng(_SEED)
    # A resample at a time: of 14,000 questions all of them at once would take gigabytes.
    means = [differences[draw.integers(0, number, number)].mean() for _ in range(NUM_RESAMPLES)]
    # Both tails of 95 %. The wider interval counts: the bootstrap is too narrow for few questions.
    ends = np.quantile(means, [0.025, 0.975])
    reach = stats.t.ppf(0.975, number - 1) * differences.std(ddof=1) / number**0.5
    mean = differences.mean()
    return float(min(ends[0], mean - reach)), float(max(ends[1], mean + reach))


def _bound_proportions(gained: int, lost: int, number: int) -> tuple[float, float]:
    from scipy import stats

    # Bonett and Price add one to both counts, and two to the number.
    more, less = (gained + 1) / (number + 2), (lost + 1) / (number + 2)
    reach = stats.norm.ppf(0.975) * ((more + less - (more - less) ** 2) / (number + 2)) ** 0.5
    low, high = more - less - reach, more - less + reach
    if changed := gained + lost:
        # Given which answers changed, the number gained is binomial: 2 p - 1 of them, as a share of all questions.
        exact = stats.binomtest(gained, changed).proportion_ci(0.95, "exact")
        low = min(low, (2 * exact.low - 1) * changed / number)
        high = max(high, (2 * exact.high - 1) * changed / number)
    return max(float(low), -1.0), min(float(high), 1.0)

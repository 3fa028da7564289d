"""Confidence intervals of the mean of paired differences."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

NUM_RESAMPLES: Final = 2000
"""Resamples of the bootstrap."""
_SEED: Final = 0
_FEWEST: Final = 6
"""Smallest n with 2 / 2^n below 5 %: with fewer questions, no two-sided sign test is significant."""


def compute_interval(differences: Any) -> tuple[float, float]:
    """Return a 95 % confidence interval, low and high end, of the mean of paired differences.

    It is conservative, except for scores of strongly skewed differences: 86 to 89 % coverage of lognormal ones.

    For differences of -1, 0 and 1 (right or wrong answers): the union of Bonett and Price's interval and the exact one
    of McNemar's test, which excludes 0 only if that test is significant. For other scores: the union of Student's
    interval and the percentile bootstrap over questions; infinite for fewer than six questions.

    Args:
        differences: Difference for each question, ``(N,)``.

    Source: Bonett and Price 2012; McNemar 1947 (``scipy.stats.binomtest``); Efron 1979. Coverage is tested in
    ``tests/evaluation/test_intervals.py``.
    """
    from scipy import stats  # Takes a third of a second to import, which `recipes check --help` would wait for.

    number = len(differences)
    if number < 2:
        return -np.inf, np.inf
    if np.isin(differences, (-1, 0, 1)).all():
        return _bound_proportions(int((differences > 0).sum()), int((differences < 0).sum()), number)
    if number < _FEWEST:
        return -np.inf, np.inf
    # Seeded, so that the same scores always give the same interval.
    draw = np.random.default_rng(_SEED)
    # One resample at a time: all at once would take gigabytes for 14,000 questions.
    means = [differences[draw.integers(0, number, number)].mean() for _ in range(NUM_RESAMPLES)]
    # The bootstrap interval is too narrow for few questions, and Student's ignores skewness: their union is returned.
    ends = np.quantile(means, [0.025, 0.975])
    reach = stats.t.ppf(0.975, number - 1) * differences.std(ddof=1) / number**0.5
    mean = differences.mean()
    return float(min(ends[0], mean - reach)), float(max(ends[1], mean + reach))


def _bound_proportions(gained: int, lost: int, number: int) -> tuple[float, float]:
    """Return the interval of ``(gained - lost) / number`` for ``number`` right or wrong answers."""
    from scipy import stats

    # Bonett and Price: a Wald interval after adding one to both counts and two to the number (Laplace).
    more, less = (gained + 1) / (number + 2), (lost + 1) / (number + 2)
    reach = stats.norm.ppf(0.975) * ((more + less - (more - less) ** 2) / (number + 2)) ** 0.5
    low, high = more - less - reach, more - less + reach
    if changed := gained + lost:
        # McNemar: given the answers that changed, the number gained is binomial with share p. Gained minus lost is
        # (2 p - 1) * changed.
        exact = stats.binomtest(gained, changed).proportion_ci(0.95, "exact")
        low = min(low, (2 * exact.low - 1) * changed / number)
        high = max(high, (2 * exact.high - 1) * changed / number)
    return max(float(low), -1.0), min(float(high), 1.0)

"""Confidence intervals: coverage by simulation, and consistency with McNemar's exact test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recipes_lib.evaluation.intervals import compute_interval


def test_interval_has_nominal_coverage() -> None:
    drawn = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = compute_interval(drawn.choice([-1.0, 0.0, 1.0], 80, p=[0.1, 0.6, 0.3]))
        covered += low <= 0.2 <= high
    # 4.5 standard errors below 0.95; full coverage would mean that the interval is uselessly wide.
    assert 0.88 <= covered / 200 < 1


@pytest.mark.parametrize("number", [2, 5, 6, 9, 16])
def test_binary_interval_is_consistent_with_exact_mcnemar(number: int) -> None:
    for gained in range(number + 1):
        for lost in range(number + 1 - gained):
            differences = np.array([1.0] * gained + [-1.0] * lost + [0.0] * (number - gained - lost))
            low, high = compute_interval(differences)
            assert -1 <= low <= differences.mean() <= high <= 1
            assert compute_interval(-differences) == pytest.approx((-high, -low))
            if low > 0 or high < 0:
                assert stats.binomtest(gained, gained + lost).pvalue < 0.05


def test_interval_of_few_questions_includes_zero() -> None:
    assert compute_interval(np.array([1.0])) == (-np.inf, np.inf)
    assert compute_interval(np.array([0.3] * 5)) == (-np.inf, np.inf)
    low, high = compute_interval(np.array([1.0, 1.0]))
    assert low < 0 < high
    assert compute_interval(np.array([0.3, 0.2, 0.3, 0.4, 0.3, 0.2]))[0] > 0
    # One of seven questions changed: a percentile bootstrap alone would exclude zero.
    low, high = compute_interval(np.array([0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert low < 0 < high

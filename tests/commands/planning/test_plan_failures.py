"""Save interval and goodput, compared with a search and a simulation; published values: ``test_known_answers.py``."""

from __future__ import annotations

import numpy as np
import pytest

from recipes_lib.commands.planning.plan import Failures
from recipes_lib.config.command_flags import FLAGS

_LLAMA_3_HOURS = FLAGS["planning"]["failure_hours"]["default"] / 16_384


def _simulate(failures: Failures, interval: float, num_segments: int) -> float:
    """Return the goodput of a simulated run with exponentially distributed failures."""
    rng = np.random.default_rng(0)
    clock, next_failure, restarting = 0.0, rng.exponential(failures.mean_seconds), False
    for _ in range(num_segments):
        while True:
            needed = interval + failures.save_seconds + restarting * failures.restart_seconds
            if clock + needed <= next_failure:
                clock, restarting = clock + needed, False
                break
            clock = next_failure
            next_failure, restarting = clock + rng.exponential(failures.mean_seconds), True
    return num_segments * interval / clock


@pytest.mark.parametrize(("save_seconds", "expected"), [(60, 1116), (1800, 5185)])
def test_interval_is_near_optimum_of_search(save_seconds, expected):
    failures = Failures(_LLAMA_3_HOURS * 3600, save_seconds, 300)
    interval = failures.compute_interval()
    assert interval == pytest.approx(expected, rel=2e-3)
    best = max(failures.compute_goodput(seconds) for seconds in range(60, 20_000, 10))
    assert failures.compute_goodput(interval) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("interval", [300.0, 1139.0, 3600.0])
@pytest.mark.parametrize("restart_seconds", [0.0, 300.0, 3000.0])
def test_goodput_matches_simulation(interval, restart_seconds):
    failures = Failures(_LLAMA_3_HOURS * 3600, 60, restart_seconds)
    simulated = _simulate(failures, interval, num_segments=40_000)
    assert failures.compute_goodput(interval) == pytest.approx(simulated, rel=0.02)


def test_goodput_is_zero_if_saving_exceeds_time_between_failures():
    failures = Failures(mean_seconds=10, save_seconds=100_000, restart_seconds=0)
    assert failures.compute_interval() == 10
    assert failures.compute_goodput(10) == 0.0

"""Spikes are found, noise and descent are not; by the formula, on curves of real runs and on simulated ones."""

import json
import math

import numpy as np
import pytest

from recipes_lib.training.guards.step_guard import FACTOR, MAD_TO_STD, MIN_STEPS, SpikeMonitor

STEPS = np.arange(1500)
DESCENT = 2.5 + 8 * np.exp(-STEPS / 60)


def find_spikes(losses, norms=None):
    monitor = SpikeMonitor()
    norms = np.ones_like(losses) if norms is None else norms
    judged = [monitor.find_spike(float(loss), float(norm)) for loss, norm in zip(losses, norms, strict=True)]
    return [(step, spike.figure) for step, spike in enumerate(judged) if spike is not None]


@pytest.mark.parametrize(("level", "scale"), [(3, np.log), (0, lambda losses: losses)])
def test_the_threshold_is_the_formula(level, scale):
    """In logarithms where all losses are above 0; elsewhere with the upper tenth, which counts where it is wider."""
    losses = np.random.default_rng(0).normal(level, 0.1, 40)
    scaled = scale(losses)
    median = np.median(scaled)
    deviation = 1.4826 * np.median(abs(scaled - median))
    if not level:
        deviation = max(deviation, (np.quantile(losses, 0.9) - median) / 1.2815516)
    unscale = np.exp if level else scale
    threshold = unscale(median + 6 * deviation)
    for value, is_spike in ((threshold * 1.0001, True), (threshold * 0.9999, False)):
        monitor = SpikeMonitor()
        for loss in losses:
            assert monitor.find_spike(loss, 1.0) is None
        spike = monitor.find_spike(value, 1.0)
        assert (spike is not None) == is_spike
        if spike is not None:
            assert (spike.value, spike.median, spike.threshold) == pytest.approx((value, unscale(median), threshold))
    # 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
    sample = np.random.default_rng(1).normal(0, 2, 400_000)
    assert MAD_TO_STD * np.median(abs(sample - np.median(sample))) == pytest.approx(2, rel=0.01)


def lose_sigmoid(margins):
    return np.logaddexp(0, -margins)


def lose_robustly(margins):
    return (0.9 * lose_sigmoid(margins) - 0.1 * lose_sigmoid(-margins)) / 0.8


STATIONARY = {
    "pairs most of which are learnt": (lose_sigmoid, 6, 3),
    "pairs half learnt": (lose_sigmoid, 2, 2),
    "pairs without a margin to reach": (lambda margins: np.maximum(0, 1 - margins), 3, 1.5),
    "pairs of which some may be the wrong way round": (lose_robustly, 6, 3),
    "normal noise": (lambda figures: figures, 3, 0.3),
    "normal noise around 0": (lambda figures: figures, 0, 1),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_a_healthy_loss_raises_no_alarm_however_skewed(name):
    """Means of eight pairs a step, whose margins stay as they are: at most one alarm in a thousand steps."""
    lose, mean, deviation = STATIONARY[name]
    margins = (np.random.default_rng(seed).normal(mean, deviation, (2000, 8)) for seed in range(3))
    alarms = [len(find_spikes(lose(drawn).mean(1))) for drawn in margins]
    assert np.mean(alarms) <= 2


def test_a_loss_of_pairs_that_breaks_down_is_found():
    losses = lose_sigmoid(np.random.default_rng(0).normal(2, 2, (200, 8))).mean(1)
    assert find_spikes([*losses, 8.0]) == [(200, "loss")]


def test_a_loss_that_was_0_has_nothing_to_be_measured_by():
    assert find_spikes([0.0] * 30 + [0.5]) == []


@pytest.mark.parametrize("value", [3.0, -3.0])
def test_a_curve_without_noise_is_not_judged_by_its_last_digits(value):
    assert find_spikes([value] * 30 + [value + 0.11 * abs(value)]) == []
    assert find_spikes([value] * 30 + [value + 0.13 * abs(value)]) == [(30, "loss")]


def test_a_norm_is_judged_by_its_logarithm():
    norms = np.random.default_rng(0).lognormal(0, 0.5, 40)
    logs = np.log(norms)
    deviation = MAD_TO_STD * np.median(abs(logs - np.median(logs)))
    threshold = math.exp(np.median(logs) + FACTOR * deviation)
    assert find_spikes(np.ones(41), [*norms, threshold * 0.999]) == []
    assert find_spikes(np.ones(41), [*norms, threshold * 1.001]) == [(40, "grad_norm")]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [30, 200, 1400])
def test_a_jump_from_2_4_to_5_2_is_found_late_and_a_larger_one_in_the_descent(seed, at):
    losses = DESCENT + np.random.default_rng(seed).normal(0, 0.1, len(STEPS))
    losses[at] = 5.2 if at > 100 else 40
    assert find_spikes(losses) == [(at, "loss")]


@pytest.mark.parametrize("seed", range(10))
def test_descent_and_noise_raise_no_alarm(seed):
    generator = np.random.default_rng(seed)
    normal = generator.normal(0, 0.1, len(STEPS))
    # Norms whose noise multiplies: one in a thousand is five times the median.
    norms = generator.lognormal(0, 0.5, len(STEPS)) * (0.3 + np.exp(-STEPS / 40))
    assert find_spikes(DESCENT + normal, norms) == []
    # A warm-up: the loss falls slowly, then fast; the norm rises and falls.
    warming = 10.8 - 6 / (1 + np.exp(-(STEPS - 150) / 40)) + normal
    assert find_spikes(warming, norms * (1 + np.exp(-(((STEPS - 150) / 60) ** 2)))) == []


def test_heavy_tails_of_the_loss_raise_few_alarms():
    alarms = [
        len(find_spikes(DESCENT + 0.1 * np.random.default_rng(seed).standard_t(5, len(STEPS)))) for seed in range(10)
    ]
    # Student's t with 5 degrees of freedom exceeds six of its MAD-deviations once in 1,500 draws.
    assert np.mean(alarms) / len(STEPS) < 2e-3


def test_what_was_seen_travels_and_too_little_is_not_judged():
    losses = np.random.default_rng(2).normal(3, 0.1, 60)
    monitor = SpikeMonitor()
    for loss in losses:
        monitor.find_spike(loss, loss)
    restored = SpikeMonitor()
    restored.restore(monitor.export())
    assert restored.find_spike(3.4, 3.0) == monitor.find_spike(3.4, 3.0)
    assert restored.export() == monitor.export()
    restored.restore({})
    assert find_spikes([3.0] * (MIN_STEPS - 1) + [300.0]) == []
    assert find_spikes([3.0] * MIN_STEPS + [300.0]) == [(MIN_STEPS, "loss")]


def test_a_step_is_held_against_steps_of_its_kind():
    """Two objectives in turn, one ten times the other: no spike, and a jump of the smaller one is still found."""
    monitor, noise = SpikeMonitor(), np.random.default_rng(0).normal(1, 0.05, 200)
    for step, factor in enumerate(noise):
        kind, level = ("", 10.0) if step % 4 else ("answers", 1.0)
        assert monitor.find_spike(level * factor, level * factor, kind) is None
    restored = SpikeMonitor()
    restored.restore(json.loads(json.dumps(monitor.export())))
    for find_spike in (monitor.find_spike, restored.find_spike):
        assert find_spike(5.0, 1.0, "answers") is not None
        assert find_spike(5.0, 1.0) is None

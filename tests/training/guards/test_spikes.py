"""``SpikeMonitor``, against its formula and on simulated losses and gradient norms."""

import json
import math
import re

import numpy as np
import pytest

from recipes_lib.training.guards.step_guard import FACTOR, MAD_TO_STD, MIN_STEPS, SpikeMonitor

STEPS = np.arange(1500)
DESCENT = 2.5 + 8 * np.exp(-STEPS / 60)


def find_spikes(losses, norms=None):
    monitor = SpikeMonitor()
    norms = np.ones_like(losses) if norms is None else norms
    found = [monitor.find_spike(float(loss), float(norm)) for loss, norm in zip(losses, norms, strict=True)]
    return [(step, spike.partition(" ")[0]) for step, spike in enumerate(found) if spike is not None]


@pytest.mark.parametrize(("level", "scale"), [(3, np.log), (0, lambda losses: losses)])
def test_threshold_equals_formula(level, scale):
    """Positive losses are compared as logarithms; otherwise the upper tenth is a floor of the deviation."""
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
            numbers = [float(number) for number in re.findall(r"-?\d[\d.e+-]*", spike)]
            assert numbers == pytest.approx([value, threshold, unscale(median)], rel=1e-3, abs=1e-4)
    # 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
    sample = np.random.default_rng(1).normal(0, 2, 400_000)
    assert MAD_TO_STD * np.median(abs(sample - np.median(sample))) == pytest.approx(2, rel=0.01)


def compute_sigmoid_loss(margins):
    return np.logaddexp(0, -margins)


def compute_robust_loss(margins):
    return (0.9 * compute_sigmoid_loss(margins) - 0.1 * compute_sigmoid_loss(-margins)) / 0.8


STATIONARY = {
    "mostly learnt preferences": (compute_sigmoid_loss, 6, 3),
    "half learnt preferences": (compute_sigmoid_loss, 2, 2),
    "hinge loss": (lambda margins: np.maximum(0, 1 - margins), 3, 1.5),
    "robust loss": (compute_robust_loss, 6, 3),
    "normal noise": (lambda values: values, 3, 0.3),
    "normal noise around zero": (lambda values: values, 0, 1),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_stationary_skewed_loss_has_no_false_alarm(name):
    """Steps of eight pairs with stationary margins have at most one false alarm in a thousand steps."""
    compute_loss, mean, deviation = STATIONARY[name]
    margins = np.random.default_rng(0).normal(mean, deviation, (2000, 8))
    assert len(find_spikes(compute_loss(margins).mean(1))) <= 2


def test_diverged_preference_loss_is_detected():
    losses = compute_sigmoid_loss(np.random.default_rng(0).normal(2, 2, (200, 8))).mean(1)
    assert find_spikes([*losses, 8.0]) == [(200, "loss")]


def test_constant_zero_loss_disables_detection():
    assert find_spikes([0.0] * 30 + [0.5]) == []


@pytest.mark.parametrize("value", [3.0, -3.0])
def test_noiseless_curve_uses_floor(value):
    assert find_spikes([value] * 30 + [value + 0.11 * abs(value)]) == []
    assert find_spikes([value] * 30 + [value + 0.13 * abs(value)]) == [(30, "loss")]


def test_gradient_norm_is_compared_as_logarithm():
    norms = np.random.default_rng(0).lognormal(0, 0.5, 40)
    logs = np.log(norms)
    deviation = MAD_TO_STD * np.median(abs(logs - np.median(logs)))
    threshold = math.exp(np.median(logs) + FACTOR * deviation)
    assert find_spikes(np.ones(41), [*norms, threshold * 0.999]) == []
    assert find_spikes(np.ones(41), [*norms, threshold * 1.001]) == [(40, "gradient")]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("at", "loss"), [(30, 40.0), (200, 5.2), (1400, 5.2)])
def test_jump_is_detected(seed, at, loss):
    """Of the loss from 2.4 to 5.2, and of a larger one during the initial descent."""
    losses = DESCENT[: at + 1] + np.random.default_rng(seed).normal(0, 0.1, at + 1)
    assert find_spikes([*losses[:at], loss]) == [(at, "loss")]


@pytest.mark.parametrize("seed", range(3))
def test_descent_and_noise_have_no_false_alarm(seed):
    generator = np.random.default_rng(seed)
    normal = generator.normal(0, 0.1, len(STEPS))
    # Log-normal noise of the norm: one in a thousand exceeds five times the median.
    norms = generator.lognormal(0, 0.5, len(STEPS)) * (0.3 + np.exp(-STEPS / 40))
    assert find_spikes(DESCENT + normal, norms) == []
    # As in a warmup: the loss falls slowly, then fast; the norm rises and falls.
    warming = 10.8 - 6 / (1 + np.exp(-(STEPS - 150) / 40)) + normal
    assert find_spikes(warming, norms * (1 + np.exp(-(((STEPS - 150) / 60) ** 2)))) == []


def test_heavy_tails_have_few_false_alarms():
    alarms = [
        len(find_spikes(DESCENT + 0.1 * np.random.default_rng(seed).standard_t(5, len(STEPS)))) for seed in range(4)
    ]
    # Student's t with 5 degrees of freedom exceeds 6 * 1.4826 * MAD once in 1,500 draws.
    assert np.mean(alarms) / len(STEPS) < 2e-3


def test_export_restores_windows_and_few_steps_are_not_compared():
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


def test_steps_are_compared_within_their_kind():
    """Two alternating objectives of different level: no spike, and a jump of the smaller one is detected."""
    monitor, noise = SpikeMonitor(), np.random.default_rng(0).normal(1, 0.05, 200)
    for step, factor in enumerate(noise):
        kind, level = ("", 10.0) if step % 4 else ("answers", 1.0)
        assert monitor.find_spike(level * factor, level * factor, kind) is None
    restored = SpikeMonitor()
    restored.restore(json.loads(json.dumps(monitor.export())))
    for find_spike in (monitor.find_spike, restored.find_spike):
        assert find_spike(5.0, 1.0, "answers") is not None
        assert find_spike(5.0, 1.0) is None

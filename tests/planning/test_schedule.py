"""Learning rates against closed forms, at every step of a run."""

import math

import pytest

from recipes_lib.planning.schedule import compute_learning_rates

PEAK, STEPS, WARMUP = 3e-4, 100, 10


def linear(step):
    return step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)


def cosine(step):
    return step / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def cosine_to_a_tenth(step):
    return step / WARMUP if step < WARMUP else 0.1 + 0.9 * cosine(step)


def constant(step):
    return 1.0


@pytest.mark.parametrize(
    ("name", "kwargs", "closed_form"),
    [
        ("linear", None, linear),
        ("cosine", None, cosine),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, cosine_to_a_tenth),
        ("constant", None, constant),
    ],
)
def test_the_learning_rate_is_the_closed_form(name, kwargs, closed_form):
    training = {"learning_rate": PEAK, "lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs}
    rates = compute_learning_rates(training, STEPS, WARMUP, range(STEPS + 1))
    assert rates == pytest.approx([PEAK * closed_form(step) for step in range(STEPS + 1)], abs=1e-12)


def test_a_schedule_that_reacts_to_the_run_is_not_predicted():
    assert compute_learning_rates({"lr_scheduler_type": "reduce_lr_on_plateau"}, STEPS, WARMUP, [0]) is None

"""Learning-rate schedules, compared with closed forms and transformers at every step; plans of pretraining."""

import functools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planning.runs import build_config

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import ScheduleConfig
from recipes_lib.errors import ConfigError
from recipes_lib.planning.schedule import (
    agree_until,
    build_schedule,
    compute_learning_rates,
    compute_row_starts,
    count_run_tokens,
    plan_pretraining,
)

PEAK, STEPS, WARMUP = 3e-4, 100, 10


def test_metric_dependent_schedule_is_not_predicted():
    assert compute_learning_rates(PEAK, {"lr_scheduler_type": "reduce_lr_on_plateau"}, STEPS, WARMUP, [0]) is None


@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        ("linear", {}, None),
        ("cosine", {}, None),
        ("cosine", {"num_cycles": 1.5}, None),
        ("cosine_with_restarts", {"num_cycles": 5}, None),
        ("polynomial", {"power": 8.0, "lr_end": 0.0}, None),
        ("inverse_sqrt", {}, None),
        ("constant", {}, None),
        ("warmup_stable_decay", {"num_decay_steps": 90}, None),
        ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 69}, None),  # The last step has 0.
        ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 30}, "40%"),
        ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 30, "min_lr_ratio": 0.1}, None),
    ],
)
@pytest.mark.parametrize("scale", [1, 100])
def test_schedule_that_ends_before_the_run_is_refused(kind, options, share, scale):
    options = {name: value * scale if name.endswith("steps") else value for name, value in options.items()}
    training = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options}
    compute = functools.partial(compute_learning_rates, PEAK, training, STEPS * scale, WARMUP * scale, [0])
    if share is None:
        compute()
    else:
        with pytest.raises(ConfigError, match=f"the learning rate is 0 in {share} of the"):
            compute()


# Pretraining schedules, by default with 8 rows of 4 tokens per step.

LENGTH, ROWS = 4, 8
KINDS = ("constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay")
DECAYS = ("linear", "cosine", "1-sqrt", "exponential")


def build(kind, num_steps=STEPS, *, warmup_steps=WARMUP, accumulation=1, **keys):
    """Build the schedule of a run, with a batch ramp if ``batch_ramp_tokens`` is given."""
    schedule = ScheduleConfig(**keys)
    starts = compute_row_starts(
        max_length=LENGTH,
        rows_per_micro_step=ROWS // accumulation,
        accumulation=accumulation,
        num_steps=num_steps,
        ramp_tokens=schedule.batch_ramp_tokens,
        ramp_start=schedule.batch_ramp_start,
    )
    training = {"lr_scheduler_type": kind, "warmup_steps": warmup_steps}
    return build_schedule(schedule, training, starts, LENGTH, ROWS // accumulation * accumulation)


def decay_linear(p, r):
    return r + (1 - p) * (1 - r)


def decay_cosine(p, r):
    return r + (1 - r) * math.cos(math.pi * p / 2) ** 2


def decay_one_minus_sqrt(p, r):
    return r + (1 - r) * (1 - p**0.5)


def decay_exponential(p, r):
    return math.exp(p * math.log(r))


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@pytest.mark.parametrize(("kind", "decay_factor"), [("linear", decay_linear), ("cosine", decay_cosine)])
def test_warmup_and_decay_match_closed_forms(kind, decay_factor, ratio):
    rises = [(step + 1) / WARMUP for step in range(WARMUP)]
    expected = rises + [decay_factor((step - WARMUP) / (STEPS - WARMUP), ratio) for step in range(WARMUP, STEPS + 1)]
    schedule = build(kind, min_lr_ratio=ratio)
    assert schedule.factors(range(STEPS + 1)) == pytest.approx(expected, abs=1e-12)
    assert [schedule(STEPS + past) for past in (0, 1, 1000)] == pytest.approx([ratio] * 3)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@pytest.mark.parametrize(
    ("decay", "decay_factor"),
    [
        ("linear", decay_linear),
        ("cosine", decay_cosine),
        ("1-sqrt", decay_one_minus_sqrt),
        ("exponential", decay_exponential),
    ],
)
@pytest.mark.parametrize("decay_steps", [20, 0.2])
def test_stable_phase_keeps_peak_until_decay(decay, decay_factor, decay_steps, ratio):
    schedule = build("warmup_stable_decay", min_lr_ratio=ratio, decay_steps=decay_steps, decay_type=decay)
    expected = [1.0] * (80 - WARMUP) + [decay_factor((step - 80) / 20, ratio) for step in range(80, STEPS + 1)]
    assert schedule.factors(range(WARMUP, STEPS + 1)) == pytest.approx(expected, abs=1e-12)
    assert schedule.factors([STEPS + 1, 10**6]) == pytest.approx([ratio] * 2)
    assert schedule.first_decay_step == 80
    assert build("cosine", min_lr_ratio=ratio).first_decay_step is None


def test_inverse_sqrt_continues_past_end_down_to_floor():
    schedule = build("inverse_sqrt", min_lr_ratio=0.1)
    for step in (WARMUP, 40, STEPS, 4 * STEPS):
        assert schedule(step) == pytest.approx(max(0.1, (WARMUP / step) ** 0.5))
    assert schedule(100 * WARMUP) == pytest.approx(0.1)
    assert schedule(101 * WARMUP) == 0.1
    without_warmup = build("inverse_sqrt", warmup_steps=0, min_lr_ratio=0.0)
    assert without_warmup.factors([0, 1, 4, 9]) == pytest.approx([1, 1, 1 / 2, 1 / 3])


def test_constant_rate_stays_at_peak():
    assert build("constant").factors([WARMUP - 1, WARMUP, STEPS, 10 * STEPS]).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("kind", "options", "keys"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {"min_lr_ratio": 0.0}),
        ("cosine", {}, {"min_lr_ratio": 0.0}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {}),
        ("inverse_sqrt", {}, {"min_lr_ratio": 0.0}),
        *(
            (
                "warmup_stable_decay",
                {"num_decay_steps": 20, "decay_type": decay, "min_lr_ratio": 0.1},
                {"decay_type": decay},
            )
            for decay in ("linear", "cosine", "1-sqrt")
        ),
    ],
)
def test_schedules_match_transformers_after_warmup(kind, options, keys):
    ours = build({"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(kind, kind), **keys)
    training = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options}
    theirs = np.array(compute_learning_rates(PEAK, training, STEPS, WARMUP, range(STEPS + 1))) / PEAK
    assert ours.factors(range(WARMUP, STEPS + 1)) == pytest.approx(theirs[WARMUP:], abs=1e-12)
    if "min_lr_ratio" not in options:
        # transformers is one step behind: its first rate is 0. With a floor, its warm-up starts there.
        assert ours.factors(range(WARMUP - 1)) == pytest.approx(theirs[1:WARMUP], abs=1e-12)


@pytest.mark.parametrize(
    ("warmup", "num_warmup_steps"), [({"warmup_steps": 0.1}, 10), ({"warmup_steps": 7}, 7), ({"warmup_steps": 0}, 0)]
)
def test_warmup_is_share_or_number_of_steps(warmup, num_warmup_steps):
    schedule = build("cosine", **warmup)
    assert schedule.num_warmup_steps == num_warmup_steps
    assert schedule.factors(range(num_warmup_steps)).tolist() == pytest.approx(
        [(step + 1) / num_warmup_steps for step in range(num_warmup_steps)]
    )


def test_warmup_of_gpt_3_in_tokens():
    """Warm-up over 375 million of 300 billion tokens, during the batch ramp."""
    keys = {"batch_ramp_tokens": 12 * 10**9, "batch_ramp_start": 0.01, "batch_ramp_lr": "constant"}
    schedule = ScheduleConfig(warmup_tokens=375 * 10**6, **keys)
    run = {"max_length": 2048, "rows_per_micro_step": 16, "accumulation": 100, "num_tokens": 300 * 10**9}
    starts = compute_row_starts(**run, ramp_tokens=12 * 10**9, ramp_start=0.01)
    built = build_schedule(schedule, {"lr_scheduler_type": "cosine"}, starts, 2048, 1600)
    tokens = starts * 2048
    last = built.num_warmup_steps
    assert tokens[last - 1] < 375 * 10**6 <= tokens[last]
    assert built.factors(range(last)) == pytest.approx(np.minimum(1, tokens[1 : last + 1] / 375e6))
    middle = int(np.searchsorted(tokens, 150e9))
    assert built(middle) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 150e9 / 300e9)), abs=2e-3)


@pytest.mark.parametrize(("follows", "exponent"), [("constant", 0), ("sqrt", 0.5), ("linear", 1)])
def test_rate_scales_with_batch_on_ramp(follows, exponent):
    ramp = {"batch_ramp_tokens": 1000, "batch_ramp_start": 0.25, "accumulation": 8, "warmup_steps": 0}
    schedule = build("constant", batch_ramp_lr=follows, **ramp)
    batches = np.diff(schedule.token_starts) / (LENGTH * ROWS)
    assert batches[0] == 0.25
    assert batches[-1] == 1
    assert schedule.factors(range(STEPS)) == pytest.approx(batches**exponent)


def test_full_batch_is_known_if_run_ends_on_ramp():
    ramp = {"batch_ramp_tokens": 10**6, "batch_ramp_start": 0.3, "batch_ramp_lr": "linear", "accumulation": 8}
    short, long = (build("constant", num_steps, **ramp) for num_steps in (20, 2000))
    assert short(15) == pytest.approx(3 / 8)
    assert agree_until(short, long, 20)


shapes = st.tuples(
    st.sampled_from(KINDS),
    st.fixed_dictionaries(
        {
            "warmup_steps": st.sampled_from([0, 0.01, 0.2, 5]),
            "min_lr_ratio": st.sampled_from([0.001, 0.1, 1.0]),
            "decay_steps": st.sampled_from([0.1, 0.5, 3]),
            "decay_type": st.sampled_from(DECAYS),
            "batch_ramp_tokens": st.none() | st.integers(1, 2000),
            "batch_ramp_start": st.sampled_from([0.1, 0.5, 1.0]),
            "batch_ramp_lr": st.sampled_from(["constant", "sqrt", "linear"]),
            "accumulation": st.sampled_from([1, 4, 8]),
        }
    ),
)


@given(shape=shapes, num_steps=st.integers(20, 150))
def test_factors_rise_then_fall_between_floor_and_one(shape, num_steps):
    kind, keys = shape
    schedule = build(kind, num_steps, **keys)
    factors = schedule.factors(range(num_steps + 20))
    assert ((factors >= 0) & (factors <= 1)).all()
    batches = np.append(np.diff(schedule.token_starts), [LENGTH * ROWS] * 20) / (LENGTH * ROWS)
    shape_alone = factors / batches**schedule.batch_exponent
    warm = schedule.num_warmup_steps
    assert (np.diff(shape_alone[:warm]) > 0).all()
    assert (np.diff(shape_alone[max(warm - 1, 0) :]) <= 1e-12).all()
    if warm:
        assert shape_alone[warm - 1] == pytest.approx(1)
    assert shape_alone[warm:].min(initial=1) >= schedule.min_ratio - 1e-12


@given(shape=shapes, num_steps=st.integers(20, 100), more=st.integers(1, 100))
def test_stable_phase_does_not_depend_on_run_length(shape, num_steps, more):
    keys = shape[1] | {"warmup_steps": 5}
    short, long = (build("warmup_stable_decay", length, **keys) for length in (num_steps, num_steps + more))
    stable = min(short.first_decay_step, long.first_decay_step)
    assert agree_until(short, long, stable + 1)


def test_stable_schedules_agree_until_decay_and_cosine_does_not():
    short, long = (build("warmup_stable_decay", length, decay_steps=20) for length in (100, 150))
    assert short.first_decay_step == 80
    assert agree_until(short, long, 81)
    assert not agree_until(short, long, 82)
    assert not agree_until(build("cosine", 100), build("cosine", 150), WARMUP + 2)
    assert not agree_until(*(build("constant", length, warmup_steps=0.1) for length in (100, 150)), 1)


def test_schedule_survives_pickling():
    schedule = build("cosine", batch_ramp_tokens=500, accumulation=4)
    copied = pickle.loads(pickle.dumps(schedule))
    assert agree_until(schedule, copied, STEPS + 5)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("cosine", {"warmup_steps": STEPS + 1}),
        ("cosine", {"warmup_tokens": STEPS * LENGTH * ROWS + 1}),
        ("warmup_stable_decay", {"decay_steps": STEPS + 1, "warmup_steps": 0}),
        ("warmup_stable_decay", {"decay_steps": STEPS - WARMUP + 1}),
    ],
)
def test_warmup_and_decay_longer_than_run_raise(kind, keys):
    with pytest.raises(ConfigError, match="longer than the run"):
        build(kind, **keys)


def test_warmup_and_decay_as_long_as_run_are_accepted():
    assert build("warmup_stable_decay", decay_steps=STEPS - WARMUP).first_decay_step == WARMUP
    assert build("linear", warmup_steps=STEPS).factors([STEPS - 1, STEPS]) == pytest.approx([1.0, 0.1])
    assert build("cosine", 1, warmup_steps=0.01)(0) == 1


# Plans of pretraining runs.


def build_run(**keys):
    defaults = {"max_length": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return build_config("pretrain", **defaults | keys)


@pytest.mark.parametrize("world_size", [1, 4])
def test_length_in_steps_tokens_and_epochs_gives_same_plan(world_size) -> None:
    batch = 2 * 4 * world_size * 128
    by_steps = plan_pretraining(build_run(max_steps=10), world_size)
    by_tokens = plan_pretraining(build_run(max_tokens=10 * batch), world_size)
    by_epochs = plan_pretraining(build_run(num_train_epochs=2.5), world_size, num_windows=10 * batch // 128 // 5 * 2)
    for plan in (by_steps, by_tokens, by_epochs):
        assert (plan.num_steps, plan.num_tokens, plan.num_rows) == (10, 10 * batch, 10 * batch // 128)
        assert (plan.rows_per_micro_step, plan.rows_per_step) == (2 * world_size, 8 * world_size)
        assert (plan.row_starts == by_steps.row_starts).all()
    for length in ({"max_steps": 10}, {"max_tokens": 10 * batch}):
        assert count_run_tokens(build_run(**length), world_size) == 10 * batch
    assert plan_pretraining(build_run(max_tokens=10 * batch + 1), world_size).num_steps == 11
    assert count_run_tokens(build_run(num_train_epochs=3), world_size) is None


def test_phases_start_at_whole_rows() -> None:
    mixture = "--dataset_mixture=[{name: a/b}, {name: c/d}]"
    curriculum = "--dataset_curriculum=[{start_tokens: 0, weights: [1, 0]}, {start_tokens: 129, weights: [1, 3]}]"
    keys = ["--model_name_or_path=a/b", "--output_dir=o", "--max_length=128", "--max_steps=9", mixture, curriculum]
    plan = plan_pretraining(load_config("pretrain", keys), 1)
    assert plan.phases == [(0, [1, 0]), (2, [1, 3])]


def test_schedule_longer_than_run_raises() -> None:
    with pytest.raises(ConfigError, match="longer than the run"):
        plan_pretraining(build_run(max_tokens=1024, warmup_tokens=1000, lr_scheduler_type="warmup_stable_decay"), 1)

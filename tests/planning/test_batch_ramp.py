"""Rows of every step under a batch ramp, compared with a loop in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.planning.schedule import compute_row_starts, count_micro_steps

runs = st.fixed_dictionaries(
    {
        "max_length": st.integers(1, 50),
        "rows_per_micro_step": st.integers(1, 6),
        "accumulation": st.integers(1, 12),
        "ramp_tokens": st.none() | st.integers(1, 20_000),
        "ramp_start": st.sampled_from([0.01, 0.07, 0.1, 0.3, 1 / 3, 0.5, 0.99, 1.0]),
    }
)


def compute_by_loop(num_steps, max_length, rows_per_micro_step, accumulation, ramp_tokens, ramp_start):
    """Return the row starts by the definition, step by step, in exact arithmetic."""
    starts = [0]
    start = Fraction(str(ramp_start))
    for _ in range(num_steps):
        tokens = starts[-1] * max_length
        on_ramp = ramp_tokens is not None and tokens < ramp_tokens
        wanted = start + (1 - start) * Fraction(tokens, ramp_tokens) if on_ramp else 1
        starts.append(starts[-1] + math.ceil(wanted * accumulation) * rows_per_micro_step)
    return starts


@given(run=runs, num_steps=st.integers(0, 200))
def test_row_starts_match_loop(run, num_steps):
    starts = compute_row_starts(num_steps=num_steps, **run)
    assert starts.dtype == np.int64
    assert starts.tolist() == compute_by_loop(num_steps, **run)


@given(run=runs, num_tokens=st.integers(1, 30_000))
def test_run_in_tokens_ends_with_step_that_reaches_them(run, num_tokens):
    starts = compute_row_starts(num_tokens=num_tokens, **run)
    num_steps = len(starts) - 1
    assert starts.tolist() == compute_row_starts(num_steps=num_steps, **run).tolist()
    assert starts[-2] * run["max_length"] < num_tokens <= starts[-1] * run["max_length"]


def test_share_is_exact_decimal():
    assert 0.07 * 100 > 7  # In floats, 8 micro-steps would be needed.
    assert count_micro_steps(100, 0.07) == 7
    assert [count_micro_steps(8, share) for share in (0.001, 0.125, 0.126, 1.0)] == [1, 1, 2, 8]


def test_millions_of_steps_and_ramp_longer_than_run_are_vectorised():
    run = {"max_length": 4096, "rows_per_micro_step": 16, "accumulation": 64, "ramp_start": 0.01}
    starts = compute_row_starts(num_steps=10**6, ramp_tokens=10**11, **run)
    assert np.diff(starts)[[0, -1]].tolist() == [16, 1024]
    assert compute_row_starts(num_steps=3, ramp_tokens=10**15, **run).tolist() == [0, 16, 32, 48]


def test_batch_ramp_of_gpt_3():
    """Batches grow from 32 thousand to 3.2 million tokens over 12 of 300 billion tokens."""
    run = {"max_length": 2048, "rows_per_micro_step": 16, "accumulation": 100, "num_tokens": 300 * 10**9}
    starts = compute_row_starts(**run, ramp_tokens=12 * 10**9, ramp_start=0.01)
    tokens, batches = starts * 2048, np.diff(starts) * 2048
    assert batches[0] == 32_768
    assert batches[-1] == 3_276_800
    first_full = int(np.argmax(batches == batches[-1]))
    # Rounded up: the batch is full from a share above 0.99.
    assert 12e9 * (0.99 - 0.01) / 0.99 < tokens[first_full] <= 12e9
    # A linear ramp in tokens from `a` to 100 micro-steps takes 12e9 / (full - first) * ln(100 / a) steps.
    steps = {a: 12e9 / (3_276_800 - 32_768) * math.log(100 / a) for a in (1, 2)}
    assert steps[2] < first_full < steps[1]
    assert len(batches) - first_full == pytest.approx((300e9 - tokens[first_full]) / 3_276_800, abs=1)

"""How many rows every optimizer step holds: a batch of constant size, or one that grows over the first tokens."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

RowStarts = np.ndarray[Any, np.dtype[np.int64]]
"""Rows trained on before each optimizer step, ``int64 (num_steps + 1,)``: the first is 0, the last all of the run."""


def compute_row_starts(
    *,
    max_length: int,
    rows_per_micro_step: int,
    accumulation: int,
    num_steps: int | None = None,
    num_tokens: int | None = None,
    ramp_tokens: int | None = None,
    ramp_start: float = 1.0,
) -> RowStarts:
    """Return the rows trained on before each optimizer step of a run, ``int64 (num_steps + 1,)``.

    On the ramp the wanted share of the full batch grows linearly in tokens, from ``ramp_start`` to 1 over
    ``ramp_tokens``; a step takes the share that is wanted at its first token, rounded up to whole micro-steps. No step
    depends on the length of the run: a longer run has the same beginning.

    Args:
        max_length: Tokens in a row.
        rows_per_micro_step: Rows of one forward and backward pass over all processes.
        accumulation: Micro-steps of a full optimizer step.
        num_steps: Length of the run in optimizer steps; or
        num_tokens: its length in tokens: the last step is the first to reach them.
        ramp_tokens: Tokens over which the batch grows; ``None`` for full batches from the first step on.
        ramp_start: Share of the full batch at the first step, above 0 and at most 1.

    Source: Brown et al. 2020 (GPT-3), appendix B, in tokens; against a loop over the steps in
    ``tests/planning/test_batch_ramp.py``.
    """
    assert (num_steps is None) != (num_tokens is None), "a run has one length"
    first_size = accumulation if ramp_tokens is None else count_micro_steps(accumulation, ramp_start)
    sizes = range(first_size, accumulation + 1)
    counts: list[int] = []
    tokens = 0
    # All steps of one size at once: there are at most `accumulation` sizes, and may be millions of steps.
    for size in sizes:
        step_tokens = size * rows_per_micro_step * max_length
        count = -(-(num_tokens - tokens) // step_tokens) if num_tokens is not None else (num_steps or 0) - sum(counts)
        if ramp_tokens is not None and size < accumulation:
            last_token = _find_last_token(size, accumulation, ramp_tokens, ramp_start)
            count = min(count, (last_token - tokens) // step_tokens + 1)
        # Never below 0: what was taken too much is less than one step of the size before, and this one is larger.
        counts.append(count)
        tokens += count * step_tokens
    rows = np.repeat(np.asarray(sizes, dtype=np.int64) * rows_per_micro_step, counts)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows)])


def count_micro_steps(accumulation: int, share: float) -> int:
    """Return the micro-steps of an optimizer step that wants ``share`` (above 0) of the full batch: rounded up."""
    return math.ceil(_read_share(share) * accumulation)


def _find_last_token(size: int, accumulation: int, ramp_tokens: int, ramp_start: float) -> int:
    """Return the last token of the ramp at which ``size`` micro-steps, fewer than ``accumulation``, are enough."""
    start = _read_share(ramp_start)
    return math.floor(ramp_tokens * (Fraction(size, accumulation) - start) / (1 - start))


def _read_share(share: float) -> Fraction:
    """Return the share as it is written: multiplied as a float, 0.07 of 100 is 7.000000000000001 and would take 8."""
    return Fraction(str(share))

"""Rewards that tell no answers apart: what counts as such, when it is told, and when it ends the run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from recipes_lib.errors import DivergedError
from recipes_lib.rl.rewards import RewardGuard

NAN = math.nan
FLAT = [[0.0, 0.0], [1.0, 1.0]]
TELLING = [[0.0, 0.0], [1.0, 0.0]]


def build(limit: int | None = 2) -> tuple[RewardGuard, list[str]]:
    told: list[str] = []
    return RewardGuard(limit, told.append), told


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([[0.1] * 4], "all 4 answers have the same reward, 0.1"),
        (FLAT, "all answers to a prompt have the same reward, for each of 2 prompts"),
        ([[NAN] * 3], "none of the 3 answers has a reward"),
        # Of one answer nothing can be told apart, and what is not known is no reward.
        ([[NAN, 2.0], [NAN, NAN]], "all 1 answers have the same reward, 2"),
        ([[NAN, 2.0, 2.0], [3.0, NAN, NAN]], "all answers to a prompt have the same reward"),
        # Rounding is no difference, whatever the scale.
        ([[1e6, 1e6 * (1 + 1e-7)], [1e-6, 1e-6 * (1 + 1e-7)]], "all answers to a prompt have the same reward"),
        (TELLING, None),
        ([[0.0, 1e-9]], None),
        ([[1.0, NAN, 2.0]], None),
        # A large reward in another group hides nothing.
        ([[1e6, 1e6], [0.1, 0.2]], None),
    ],
)
def test_a_rollout_teaches_nothing_where_no_answer_to_a_prompt_earns_more_than_another(
    rewards: list[list[float]], found: str | None
) -> None:
    guard, told = build(1)
    judged = torch.tensor(rewards, dtype=torch.float32)
    if found is None:
        guard.check(judged, step=1)
    else:
        with pytest.raises(DivergedError, match=found):
            guard.check(judged, step=1)
        guard, told = build(2)
        guard.check(judged, step=1)
        assert found in told[0]
    assert len(told) == (found is not None)


def test_it_is_told_at_once_and_whenever_twice_as_many_came_in_a_row() -> None:
    guard, told = build(None)
    for step in range(1, 10):
        guard.check(torch.tensor(FLAT), step=step)
    assert [line.split(":")[1] for line in told] == [" step 1", " step 2", " step 4", " step 8"]
    guard.check(torch.tensor(TELLING), step=10)
    guard.check(torch.tensor(FLAT), step=11)
    assert told[-1].startswith("warning: step 11:")


def test_only_so_many_in_a_row_end_the_run() -> None:
    guard, _ = build(2)
    for step in range(1, 9):
        guard.check(torch.tensor(TELLING if step % 2 else FLAT), step=step)
    with pytest.raises(DivergedError, match=r"step 9 .* raise max_zero_std_rollouts or set it to null"):
        guard.check(torch.tensor(FLAT), step=9)


def test_a_task_that_is_solved_does_not_end_the_run() -> None:
    """Every answer earns the most that was ever earned; without a rollout that told answers apart nobody knows that."""
    guard, told = build(2)
    guard.check(torch.tensor(TELLING), step=1)
    for step in range(2, 6):
        guard.check(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), step=step)
    assert "end the run here" in told[-1]
    with pytest.raises(DivergedError):
        guard.check(torch.tensor(FLAT), step=6)
    guard, _ = build(2)
    guard.check(torch.ones(2, 2), step=1)
    with pytest.raises(DivergedError):
        guard.check(torch.ones(2, 2), step=2)


@pytest.mark.parametrize("before", [[], [FLAT], [TELLING], [TELLING, FLAT], [FLAT, TELLING, FLAT], [FLAT] * 5])
def test_a_resumed_run_judges_as_if_it_had_not_been_stopped(before: list[list[list[float]]]) -> None:
    guard, told = build(8)
    for step, rewards in enumerate(before, start=1):
        guard.check(torch.tensor(rewards), step=step)
    resumed, told_resumed = build(8)
    resumed.state |= json.loads(json.dumps(guard.state))
    told.clear()
    ends = []
    for each in (guard, resumed):
        for step in range(1, 10):
            try:
                each.check(torch.tensor(FLAT), step=step)
            except DivergedError:
                ends.append(step)
                break
    assert ends[0] == ends[1]
    assert told == told_resumed

"""RewardGuard: rollouts without signal, warnings, and the limit that ends the run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from recipes_lib.errors import DivergedError
from recipes_lib.rl.rewards import RewardGuard

NAN = math.nan
FLAT = [[0.0, 0.0], [1.0, 1.0]]
VARIED = [[0.0, 0.0], [1.0, 0.0]]


def build(limit: int | None = 2) -> tuple[RewardGuard, list[str]]:
    warnings: list[str] = []
    return RewardGuard(limit, warnings.append), warnings


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([[0.1] * 4], "all 4 answers have the same reward, 0.1"),
        (FLAT, "all answers to a prompt have the same reward, for each of 2 prompts"),
        ([[NAN] * 3], "none of the 3 answers has a reward"),
        # A single scored answer has no signal; NaN is no reward.
        ([[NAN, 2.0], [NAN, NAN]], "all 1 answers have the same reward, 2"),
        ([[NAN, 2.0, 2.0], [3.0, NAN, NAN]], "all answers to a prompt have the same reward"),
        # Differences by rounding, at any scale.
        ([[1e6, 1e6 * (1 + 1e-7)], [1e-6, 1e-6 * (1 + 1e-7)]], "all answers to a prompt have the same reward"),
        (VARIED, None),
        ([[0.0, 1e-9]], None),
        ([[1.0, NAN, 2.0]], None),
        # The tolerance is relative to the rewards of the group.
        ([[1e6, 1e6], [0.1, 0.2]], None),
    ],
)
def test_rollout_of_flat_groups_has_no_signal(rewards: list[list[float]], found: str | None) -> None:
    guard, warnings = build(1)
    tensor = torch.tensor(rewards, dtype=torch.float32)
    if found is None:
        guard.check(tensor, step=1)
    else:
        with pytest.raises(DivergedError, match=found):
            guard.check(tensor, step=1)
        guard, warnings = build(2)
        guard.check(tensor, step=1)
        assert found in warnings[0]
    assert len(warnings) == (found is not None)


def test_warns_at_powers_of_two_in_a_row() -> None:
    guard, warnings = build(None)
    for step in range(1, 10):
        guard.check(torch.tensor(FLAT), step=step)
    assert [line.split(":")[1] for line in warnings] == [" step 1", " step 2", " step 4", " step 8"]
    guard.check(torch.tensor(VARIED), step=10)
    guard.check(torch.tensor(FLAT), step=11)
    assert warnings[-1].startswith("warning: step 11:")


def test_only_consecutive_flat_rollouts_end_the_run() -> None:
    guard, _ = build(2)
    for step in range(1, 9):
        guard.check(torch.tensor(VARIED if step % 2 else FLAT), step=step)
    with pytest.raises(DivergedError, match=r"step 9 .* raise max_zero_std_rollouts or set it to null"):
        guard.check(torch.tensor(FLAT), step=9)


def test_solved_task_does_not_end_the_run() -> None:
    """Solved: all rewards equal the highest of an earlier rollout with signal."""
    guard, warnings = build(2)
    guard.check(torch.tensor(VARIED), step=1)
    for step in range(2, 6):
        guard.check(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), step=step)
    assert "end the run here" in warnings[-1]
    with pytest.raises(DivergedError):
        guard.check(torch.tensor(FLAT), step=6)
    guard, _ = build(2)
    guard.check(torch.ones(2, 2), step=1)
    with pytest.raises(DivergedError):
        guard.check(torch.ones(2, 2), step=2)


@pytest.mark.parametrize("before", [[], [FLAT], [VARIED], [VARIED, FLAT], [FLAT, VARIED, FLAT], [FLAT] * 5])
def test_restored_state_gives_same_warnings_and_end(before: list[list[list[float]]]) -> None:
    guard, warnings = build(8)
    for step, rewards in enumerate(before, start=1):
        guard.check(torch.tensor(rewards), step=step)
    resumed, warnings_resumed = build(8)
    resumed.state |= json.loads(json.dumps(guard.state))
    warnings.clear()
    ends = []
    for each in (guard, resumed):
        for step in range(1, 10):
            try:
                each.check(torch.tensor(FLAT), step=step)
            except DivergedError:
                ends.append(step)
                break
    assert ends[0] == ends[1]
    assert warnings == warnings_resumed

"""Guard against rewards that do not distinguish answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from recipes_lib.errors import DivergedError

KEY: Final = "max_zero_std_rollouts"
ROUNDING: Final = 8 * torch.finfo(torch.float32).eps
"""Share of the largest reward by which equal ones may differ: a reward model reads answers in batches of any shape."""
_REMEDY: Final = (
    "Look at the answers (samples.jsonl), the columns that the rewards read, and response_length; take prompts that "
    "are neither always nor never solved, a higher temperature, or a reward that grades"
)


class RewardGuard:
    """Judges the rewards of every rollout before anything is learnt from them, on all processes alike.

    Where all answers of a group earn the same, none is better than another: in RLOO and GRPO every advantage is 0, in
    PPO whitening makes a signal of what is left, the critic's errors. A rollout of such groups alone is told, and
    again whenever twice as many have come in a row. After ``limit`` in a row the run ends, unless every answer earns
    the most that was ever earned: then the task is solved.

    Source: ``tests/rl/test_reward_guard.py``.
    """

    def __init__(self, limit: int | None, say: Callable[[str], None]) -> None:
        """Start with no rollout.

        Args:
            limit: Rollouts in a row with which the run ends; ``None`` never ends it.
            say: Tells the user a line.
        """
        self._limit, self._say = limit, say
        self._num_in_a_row, self._next_told = 0, 1
        self._best: float | None = None

    def judge(self, rewards: Tensor, *, step: int) -> None:
        """Count a rollout.

        Args:
            rewards: Of all processes, ``(groups, answers)``; NaN where no reward says what an answer is worth.
            step: The next optimizer step, from 1.

        Raises:
            DivergedError: It is the last of ``limit`` in a row.
        """
        is_known = ~rewards.isnan()
        lowest = torch.where(is_known, rewards, torch.inf).amin(dim=1)
        highest = torch.where(is_known, rewards, -torch.inf).amax(dim=1)
        known = rewards[is_known]
        # Of a group of which nothing is known the difference is minus infinity.
        if bool((highest - lowest > ROUNDING * torch.maximum(lowest.abs(), highest.abs())).any()):
            best = float(known.max())
            self._num_in_a_row, self._next_told = 0, 1
            self._best = best if self._best is None else max(self._best, best)
            return
        self._num_in_a_row += 1
        found = _describe(rewards, known)
        is_solved = (
            self._best is not None and len(known) > 0 and float(known.min()) >= self._best - ROUNDING * abs(self._best)
        )
        if self._limit is not None and self._num_in_a_row >= self._limit and not is_solved:
            raise DivergedError(
                f"step {step} was stopped before its update: the rewards of {self._num_in_a_row} rollouts in a row "
                f"taught nothing; in this one {found}. {_REMEDY}. To go on regardless, raise {KEY} or set it to null"
            )
        if self._num_in_a_row >= self._next_told:
            self._next_told = 2 * self._num_in_a_row
            remedy = "The task seems to be solved: end the run here" if is_solved else _REMEDY
            row = f", for {self._num_in_a_row} rollouts in a row" if self._num_in_a_row > 1 else ""
            self._say(f"warning: step {step}: {found}{row}; such rewards teach nothing. {remedy}")

    def export(self) -> dict[str, Any]:
        """Return what the next judgement depends on, as JSON values."""
        return {"num_in_a_row": self._num_in_a_row, "best": self._best}

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Go on from what ``export`` returned; from no rollout where it is empty."""
        self._num_in_a_row, self._best = exported.get("num_in_a_row", 0), exported.get("best")


def _describe(rewards: Tensor, known: Tensor) -> str:
    """What is alike about the rewards of a rollout, in a clause."""
    if not len(known):
        return f"no reward says what any of the {rewards.numel():,} answers is worth"
    if bool(known.max() - known.min() <= ROUNDING * known.abs().max()):
        return f"all {len(known):,} answers earn the same, {float(known[0]):.4g}"
    return f"all answers to a prompt earn the same, whichever of the {len(rewards):,} prompts it is"

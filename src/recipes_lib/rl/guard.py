"""The judge of PPO's updates: what is not a number ends the run before anything is learnt from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from recipes_lib.rl.rollout import Rollout, lay_out
from recipes_lib.training.guards import StepInputs, stop_before_update

_SPOKEN: Final = {
    "scores": "rewards",
    "engine_logps": "log-probabilities of generation",
    "logps": "log-probabilities of the policy",
    "ref_logps": "log-probabilities of the reference",
    "values": "values of the critic",
}


@dataclass(frozen=True, slots=True)
class UpdateGuard:
    """Stops all processes alike where a number is none, and puts down what it came from.

    Attributes:
        output_dir: Of the run.
        find_prompt: Gives the place of an answer's prompt among the prompts of the run, by the answer's number.

    Source: ``recipes_lib.training.guards``, by which every stage stops; ``tests/rl/test_guard.py``.
    """

    output_dir: Path
    find_prompt: Callable[[int], int]

    def judge_answers(self, rollout: Rollout, *, step: int) -> None:
        """Look at everything that an iteration will learn from; every process has the same answers, and must call.

        Args:
            rollout: All answers, before any target was worked out.
            step: The first one of the iteration, from 1.

        Raises:
            DivergedError: Something of an answer is not finite.
        """
        bad = {name: _find_bad_rows(getattr(rollout, name), rollout.mask) for name in _SPOKEN}
        name = next((name for name, rows in bad.items() if rows.any()), None)
        if name is None:
            return
        rows = torch.stack(list(bad.values())).any(dim=0).nonzero().flatten().tolist()
        why = f"the {_SPOKEN[name]} of {int(bad[name].sum())} of {len(rollout)} answers are not finite"
        self._stop({}, StepInputs(*self._describe([rollout.take(rows)])), step=step, facts={}, why=why)

    def judge(
        self,
        learner: str,
        parameters: Mapping[str, Tensor],
        parts: Sequence[Rollout],
        losses: Sequence[Tensor],
        *,
        step: int,
        loss: float,
        learning_rate: float,
        norm: float,
    ) -> None:
        """Look at a step whose gradients were summed over the processes, before they are clipped.

        Args:
            learner: Whose step it is.
            parameters: Its own, with their gradients.
            parts: This process's micro-batches.
            losses: Its share of each.
            step: Number of the step, from 1.
            loss: Of all processes.
            learning_rate: Of the update.
            norm: Of the gradients.

        Raises:
            DivergedError: Loss or norm are not finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        batches, row_ids = self._describe(parts)
        inputs = StepInputs(batches, row_ids, losses=list(losses))
        facts = {"learner": learner, "loss": loss, "grad_norm": norm, "learning_rate": learning_rate}
        self._stop(parameters, inputs, step=step, facts=facts, learner=learner)

    def _stop(self, parameters: Mapping[str, Tensor], inputs: StepInputs, why: str = "", **more: Any) -> None:
        stop_before_update(parameters, inputs, output_dir=self.output_dir, why=why, **more)

    def _describe(self, parts: Sequence[Rollout]) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
        """Everything known of each part's answers, prompts and answers as tokens besides; and their prompts' places."""
        cpu = torch.device("cpu")
        batches = [{"input_ids": lay_out(part, cpu).inputs["input_ids"], **dict(part.tensors())} for part in parts]
        return batches, [[self.find_prompt(number) for number in part.numbers.tolist()] for part in parts]


def _find_bad_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Rows where a value is not finite, ``bool (B,)``; behind an answer anything may stand."""
    bad = ~torch.isfinite(values)
    return bad if bad.dim() == 1 else (bad & mask).any(dim=1)

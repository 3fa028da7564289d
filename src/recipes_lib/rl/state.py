"""What an iteration leaves for the next: saved at its end, and found again by the process that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from recipes_lib.errors import DataError, Problem
from recipes_lib.models.saved_weights import verify_weights
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoint_saver import CheckpointSaver, Staged, Task, write_state
from recipes_lib.training.checkpoints import STAGING
from recipes_lib.training.rehearsal import compare_state, compare_weights

_STATE: Final = "ppo_state.json"


@dataclass(slots=True)
class PPOState:
    """Where a run stands; every random choice follows from it and the seed.

    Attributes:
        iteration: Iterations that are done.
        step: Optimizer steps that they took.
        num_answers: Answers that were sampled: the prompts go on from there.
        kl_coef: Price of a nat of KL.
        num_tokens: Tokens of prompts and answers so far.
        num_target_tokens: Tokens of answers so far.
        seconds: Training time so far.
        evaluated_step: After which prompts were answered last as an evaluation; -1: after none.
    """

    iteration: int = 0
    step: int = 0
    num_answers: int = 0
    kl_coef: float = 0.0
    num_tokens: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1


def stage_state(
    saver: CheckpointSaver, state: PPOState, learners: Mapping[str, Learner], folder: str = STAGING
) -> Staged:
    """Put a checkpoint together: weights, optimizer and schedule of each learner, and the counts; every process must.

    Args:
        saver: Saves it.
        state: After an iteration.
        learners: By name; all processes hold the same.
        folder: What it is put together in.
    """
    staged = saver.open(state.step, folder)
    weights = {name: dict(learner.parameters) for name, learner in learners.items()}
    shapes = {name: {key: value.shape for key, value in part.items()} for name, part in weights.items()}
    tasks: list[Task] = []
    if saver.is_main:
        states = {name: learner.optimizer.state_dict() for name, learner in learners.items()}
        saver.decide_to_copy(lambda: (weights, states))
        copies = saver.take({"weights": weights, "states": states})
        staged.mkdir(parents=True, exist_ok=True)
        (staged / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        for name, learner in learners.items():
            write_state(learner.scheduler.state_dict(), staged / f"{name}_scheduler.pt")
            tasks += [
                partial(_write_weights, copies["weights"][name], staged / f"{name}.safetensors"),
                partial(write_state, copies["states"][name], staged / f"{name}_optimizer.pt"),
            ]

    def verify() -> None:
        for name, expected in shapes.items():
            verify_weights(staged, expected, f"{name}.safetensors")

    return Staged(staged, state.step, tasks, verify)


def compare_state_with_live(folder: Path, learners: Mapping[str, Learner]) -> None:
    """Hold a checkpoint against what it was made from, to the bit.

    Raises:
        BrokenSaveError: A tensor differs, or a state cannot be read without running code.
    """
    for name, learner in learners.items():
        compare_weights(folder / f"{name}.safetensors", learner.parameters)
        compare_state(folder / f"{name}_optimizer.pt", learner.optimizer.state_dict())
        compare_state(folder / f"{name}_scheduler.pt")


def load_state(folder: Path, learners: Mapping[str, Learner]) -> PPOState:
    """Bring the learners to where a checkpoint left them, and return the counts.

    Raises:
        DataError: It holds other weights than those that are trained.
    """
    for name, learner in learners.items():
        weights = load_file(folder / f"{name}.safetensors")
        if weights.keys() != learner.parameters.keys():
            found = f"it does not hold the weights that the {name} trains"
            raise DataError(Problem(str(folder), found, "delete it, or train what it was saved from"))
        with torch.no_grad():
            for key, parameter in learner.parameters.items():
                parameter.copy_(weights[key])
        for part, owner in (("optimizer", learner.optimizer), ("scheduler", learner.scheduler)):
            owner.load_state_dict(torch.load(folder / f"{name}_{part}.pt", map_location="cpu", weights_only=True))
    return PPOState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))


def _write_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, file)

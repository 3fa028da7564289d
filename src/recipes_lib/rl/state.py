"""What an iteration leaves for the next: saved at its end, and found again by the process that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from recipes_lib.errors import DataError, Problem
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoints import STAGING, publish, write_complete

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
    """

    iteration: int = 0
    step: int = 0
    num_answers: int = 0
    kl_coef: float = 0.0
    num_tokens: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0


def save_state(output_dir: Path, state: PPOState, learners: Mapping[str, Learner], **facts: Any) -> Path:
    """Write a checkpoint: the trained weights of each learner, its optimizer and schedule, and the counts.

    Args:
        output_dir: Of the run; the checkpoint has its name there when everything is in it.
        state: After an iteration.
        learners: By name; all processes hold the same, and one writes.
        **facts: What else ``COMPLETE.json`` holds: ``world_size`` and the batch, by which another number of processes
            goes on with as many answers a step.
    """
    folder = output_dir / STAGING / f"checkpoint-{state.step}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, learner in learners.items():
        weights = {key: value.detach().contiguous() for key, value in learner.parameters.items()}
        save_file(weights, folder / f"{name}.safetensors")
        states = {"optimizer": learner.optimizer.state_dict(), "scheduler": learner.scheduler.state_dict()}
        torch.save(states, folder / f"{name}_optimizer.pt")
    (folder / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    write_complete(folder, step=state.step, **facts)
    return publish(folder)


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
        states = torch.load(folder / f"{name}_optimizer.pt", map_location="cpu", weights_only=True)
        learner.optimizer.load_state_dict(states["optimizer"])
        learner.scheduler.load_state_dict(states["scheduler"])
    return PPOState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))

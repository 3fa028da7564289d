"""Runs a recipe whose last rank fails at a given place: ``failing.py PLACE RECIPE ARGUMENTS...``."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
from tests.distributed.sharding import take_cpus_for_gpus

from recipes_lib.errors import DivergedError

WORDS = "not on this process"


def fail() -> None:
    raise ArithmeticError(WORDS)


class FailingBackward(torch.autograd.Function):
    """Identity whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        fail()


def fail_at(place: str) -> None:
    """Raise in the second step, in ``forward`` or ``backward`` of the first layer or in ``update``; or in ``scores``.

    ``scores`` is the check of the initial preference scores, which each rank makes for its own rows.
    """
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from recipes_lib.training.trainers import dpo_trainer as dpo
    from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer

    steps: list[int] = []
    train, compute, clip = RecipeTrainer.training_step, LlamaDecoderLayer.forward, RecipeTrainer._clip_grad_norm

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        return train(self, *args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_there = steps[-1:] == [1] and self.self_attn.layer_idx == 0
        if is_there and place == "forward":
            fail()
        states = compute(self, *args, **kwargs)
        return FailingBackward.apply(states) if is_there and place == "backward" else states

    def clip_grad_norm(self: Any, *args: Any) -> Any:
        if self.state.global_step == 1 and place == "update":
            fail()
        return clip(self, *args)

    def verify_first_scores(*_: Any) -> str:
        raise DivergedError(WORDS)

    if place == "scores":
        dpo.verify_first_scores = verify_first_scores
    RecipeTrainer.training_step = training_step
    LlamaDecoderLayer.forward = forward
    RecipeTrainer._clip_grad_norm = clip_grad_norm


def main() -> None:
    """Run the recipe in this process."""
    place = sys.argv[1]
    sys.argv = sys.argv[2:]
    take_cpus_for_gpus()
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fail_at(place)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

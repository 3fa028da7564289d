"""Observer of a run: counter, evaluation hooks, callbacks and progress; it changes nothing of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from transformers import TrainerCallback

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress


class EvaluationHook(Protocol):
    """Something measured beside training; it must leave model, mode and random states as it found them."""

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Return named figures of the model after ``step`` optimizer steps."""
        ...


@dataclass(frozen=True, slots=True)
class Observer:
    """What a trainer is watched by.

    Attributes:
        counter: Tokens trained on; the trainer adds to it.
        hooks: What an evaluation runs, in order.
        callbacks: Upstream's callbacks.
        progress: What the terminal shows.
        guards: What is done about spikes, and how often the machine is checked.
    """

    counter: StepCounter
    hooks: Sequence[EvaluationHook]
    callbacks: Sequence[TrainerCallback]
    progress: TrainingProgress
    guards: GuardsConfig = field(default_factory=GuardsConfig)

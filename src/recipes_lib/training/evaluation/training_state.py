"""Training state around an evaluation: modes and random states are restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from recipes_lib.models.inference import evaluating


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of Python, numpy, torch and every CUDA device at one moment."""

    _python: Any
    _numpy: Any
    _torch: torch.Tensor
    _cuda: Sequence[torch.Tensor]

    @classmethod
    def read(cls) -> RandomStates:
        """Return what they are now."""
        # The global numpy generator, because data collators and libraries draw from it.
        numpy_state = np.random.get_state()  # noqa: NPY002
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda_states = torch.cuda.get_rng_state_all() if is_used else []
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda_states)

    def restore(self) -> None:
        """Make them what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation without gradients; afterwards every mode and random state is what it was.

    The random states are Python's, numpy's, torch's and that of every CUDA device.

    Source: ``tests/training/evaluation/test_training_state.py``.
    """
    states = RandomStates.read()
    try:
        with evaluating(model):
            yield
    finally:
        states.restore()

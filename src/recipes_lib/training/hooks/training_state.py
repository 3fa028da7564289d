"""Looking at a model in the middle of its training without leaving a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation without gradients; afterwards every mode and random state is what it was.

    Modes are restored module by module, since a frozen part may be in evaluation mode on purpose. The random states
    are Python's, numpy's, torch's and that of every CUDA device.

    Source: ``tests/training/hooks/test_training_state.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    # The global numpy generator, because data collators and libraries draw from it.
    numpy_state = np.random.get_state()  # noqa: NPY002
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        torch.cuda.set_rng_state_all(cuda_states)

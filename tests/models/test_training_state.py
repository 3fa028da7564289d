"""Evaluation leaves no trace: modes, random states, and the weights that training then reaches."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from recipes_lib.models.inference import RandomStates, preserve_training_state


def draw_all() -> tuple[float, float, float]:
    from_numpy = np.random.rand()  # noqa: NPY002
    return random.random(), from_numpy, float(torch.rand(()))


def test_every_random_state_and_mode_is_restored_after_an_error_too() -> None:
    model = nn.Dropout().train()
    states = RandomStates.read()
    expected = draw_all()
    states.restore()
    for error in (None, KeyError):
        with suppress(KeyError), preserve_training_state(model):
            assert not model.training
            assert draw_all() == expected
            if error:
                raise error
        assert model.training
        assert draw_all() == expected
        states.restore()


def test_what_was_captured_can_be_drawn_again_and_again() -> None:
    states = RandomStates.read()
    draws = []
    for _ in range(3):
        states.restore()
        draws.append(draw_all())
    assert len(set(draws)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_random_state_of_the_gpu_is_restored() -> None:
    before = torch.cuda.get_rng_state()
    with preserve_training_state(nn.Identity()):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)

"""Evaluation leaves no trace: modes, random states, and the weights that training then reaches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from recipes_lib.models.inference import RandomStates, preserve_training_state


def draw_all() -> tuple[float, float, float]:
    from_numpy = np.random.rand()  # noqa: NPY002
    return random.random(), from_numpy, float(torch.rand(()))


def test_every_random_state_is_restored() -> None:
    model = nn.Linear(1, 1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draw_all()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)

    with preserve_training_state(model):
        assert draw_all() == expected

    assert draw_all() == expected


def test_each_module_returns_to_its_own_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    model[0].eval()

    with preserve_training_state(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()

    assert [module.training for module in model.modules()] == [True, False, True]
    assert torch.is_grad_enabled()


def test_an_error_inside_restores_as_well() -> None:
    model = nn.Dropout().train()
    state = torch.get_rng_state()

    def fail() -> None:
        with preserve_training_state(model):
            raise ValueError(torch.rand(3))

    with pytest.raises(ValueError, match="tensor"):
        fail()

    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_captured_can_be_drawn_again_and_again() -> None:
    states = RandomStates.read()
    draws = []
    for _ in range(3):
        states.restore()
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert len(set(draws)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_random_state_of_the_gpu_is_restored() -> None:
    before = torch.cuda.get_rng_state()
    with preserve_training_state(nn.Identity()):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)

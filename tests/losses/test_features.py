"""Hidden-state losses against their definitions in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes_lib.losses.distillation import compute_feature_sum


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def standardise_numpy(states: np.ndarray) -> np.ndarray:
    return states / np.sqrt((states**2).mean(axis=1, keepdims=True))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_feature_loss_equals_numpy_definition(kind) -> None:
    student, teacher, projection = draw(7, 4, seed=0), draw(7, 6, seed=1), draw(6, 4, seed=2)
    s, t, w = student.numpy(), teacher.numpy(), projection.numpy()
    if kind == "mse":
        expected = ((standardise_numpy(s) @ w.T - standardise_numpy(t)) ** 2).mean(axis=1).sum()
    else:
        projected = s @ w.T
        norms = np.linalg.norm(projected, axis=1) * np.linalg.norm(t, axis=1)
        expected = (1 - (projected * t).sum(axis=1) / norms).sum()
    got = compute_feature_sum(student, teacher, projection, kind)
    assert float(got) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_feature_loss_is_zero_for_equal_states(kind) -> None:
    states = draw(5, 4, seed=3).float().requires_grad_()
    projection = torch.eye(4, requires_grad=True)
    loss = compute_feature_sum(states, states, projection, kind)
    loss.backward()
    # For cosine, the projected state is normalised again, which rounds once more.
    allowed = 0 if kind == "mse" else 1e-6
    assert loss.item() <= allowed**2
    assert states.grad.abs().max() <= allowed
    assert projection.grad.abs().max() <= allowed


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_teacher_states_get_no_gradient(kind) -> None:
    student, teacher, projection = (draw(4, 4, seed=seed).requires_grad_() for seed in (10, 11, 12))
    compute_feature_sum(student, teacher, projection, kind).backward()
    assert (student.grad is None, teacher.grad is None, projection.grad is None) == (False, True, False)


def test_feature_loss_without_tokens_is_differentiable_zero() -> None:
    projection = torch.eye(4, requires_grad=True)
    loss = compute_feature_sum(torch.zeros(0, 4), torch.zeros(0, 4), projection, "mse")
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(projection.grad, torch.zeros(4, 4))


def test_half_precision_states_are_summed_in_float32() -> None:
    student, teacher = draw(5, 4, seed=13).bfloat16(), draw(5, 4, seed=14).bfloat16()
    got = compute_feature_sum(student, teacher, torch.eye(4), "mse")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, compute_feature_sum(student.float(), teacher.float(), torch.eye(4), "mse"))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_zero_state_has_finite_gradient(kind) -> None:
    student, projection = torch.zeros(2, 4, requires_grad=True), torch.eye(4, requires_grad=True)
    loss = compute_feature_sum(student, draw(2, 4, seed=15).float(), projection, kind)
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()
    assert projection.grad.isfinite().all()

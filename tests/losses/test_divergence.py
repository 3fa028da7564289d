"""Divergences between student and teacher: closed forms, limits at beta 0 and 1, and autograd gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipes_lib.losses.distillation import compute_divergence

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def value(teacher: Tensor, student: Tensor, beta: float) -> float:
    return compute_divergence(teacher, student, beta)[0].item()


def dense_divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Divergence of each pair of log-probabilities by its definition, differentiable."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return kl(teacher, mixture) / (1 - beta) + kl(student, mixture) / beta


def test_divergence_closed_forms() -> None:
    teacher, student = logs(0.7, 0.3), logs(0.4, 0.6)
    assert value(teacher, student, 0.0) == pytest.approx(0.183787, abs=1e-6)
    assert value(teacher, student, 1.0) == pytest.approx(0.192042, abs=1e-6)
    # Jensen-Shannon, half of each KL to the mean: here divided by 1/2 * 1/2.
    assert value(teacher, student, 0.5) * 0.25 == pytest.approx(0.046201, abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_gradients_equal_autograd(beta: float) -> None:
    teacher_logits, student_logits = torch.randn(
        2, 4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).mul(3)
    student_logits = student_logits.clone().requires_grad_()
    teacher, student = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    expected = dense_divergence(teacher, student, beta)
    values, slopes = compute_divergence(teacher, student.detach(), beta)
    torch.testing.assert_close(values, expected.detach())
    (gradient,) = torch.autograd.grad(expected.sum(), student_logits)
    torch.testing.assert_close(slopes - student.detach().exp() * slopes.sum(-1, keepdim=True), gradient)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_of_near_zero_probabilities_is_finite(beta: float) -> None:
    teacher, student = (torch.tensor([[0.0, gap]]).log_softmax(-1) for gap in (-300.0, 300.0))
    values, slopes = compute_divergence(teacher, student, beta)
    assert values.isfinite().all()
    assert slopes.isfinite().all()


@pytest.mark.parametrize("beta", [1e-30, 1e-7, 1e-4, 1 - 1e-4, 1 - 1e-7])
def test_divergence_near_beta_0_and_1_is_exact_to_rounding(beta: float) -> None:
    """Reference: the limits, from which the divergence differs by as much as beta does."""
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1))
    teacher, student = logits.log_softmax(-1)
    values, slopes = compute_divergence(teacher, student, beta)
    expected, limits = compute_divergence(teacher, student, float(round(beta)))
    torch.testing.assert_close(values, expected, rtol=3e-3, atol=1e-6)

    def project(slopes: Tensor) -> Tensor:  # To the derivative with respect to logits.
        return slopes - student.exp() * slopes.sum(-1, keepdim=True)

    torch.testing.assert_close(project(slopes), project(limits), rtol=3e-3, atol=3e-4)

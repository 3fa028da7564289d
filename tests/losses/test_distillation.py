"""The distillation head against closed forms and the dense computation by torch, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.losses.test_divergence import dense_divergence
from tests.losses.test_projection import LargestTensor
from tests.losses.test_token_logps import dense_logits
from torch import Tensor
from torch.nn import functional

from recipes_lib.losses.distillation import (
    DistillationSums,
    DistillationTargets,
    Objective,
    TeacherHead,
    compute_distillation,
)

NUM_TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY, SHARED = 23, 6, 9, 40, 37
OBJECTIVES = [
    Objective(alpha=0.5, beta=0.0, temperature=2.0),
    Objective(alpha=0.0, beta=0.0, temperature=1.0),
    Objective(alpha=0.3, beta=1.0, temperature=0.7),
    Objective(alpha=0.0, beta=0.4, temperature=3.0),
    Objective(alpha=1.0),
]
OPTIONS: list[dict[str, float]] = [{}, {"logit_scale": 1.7, "softcap": 1.5}]


def make_student(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def make_supervision(objective: Objective, dtype: torch.dtype = torch.float64, **options: Any) -> DistillationTargets:
    generator = torch.Generator().manual_seed(1)
    shapes = ((NUM_TOKENS, TEACHER_WIDTH), (SHARED, TEACHER_WIDTH))
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    # The student's, so that several of its predictions agree with the teacher's.
    bias = make_student(dtype)[2][:SHARED].detach()
    targets = torch.randint(0, SHARED, (NUM_TOKENS,), generator=generator)
    return DistillationTargets(targets, TeacherHead(hidden, weight, {"bias": bias, **options}), objective)


def dense_loss(
    student: list[Tensor], supervision: DistillationTargets, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and divergence from dense logits, by torch's own functions."""
    objective, teacher = supervision.objective, supervision.teacher
    logits = dense_logits(*student, **options)
    teacher_logits = dense_logits(teacher.hidden, teacher.weight, **teacher.transform)
    teacher_logps = (teacher_logits / objective.temperature).log_softmax(-1)
    student_logps = (logits[:, :SHARED] / objective.temperature).log_softmax(-1)
    divergence = dense_divergence(teacher_logps, student_logps, objective.beta).sum()
    nll = functional.cross_entropy(logits, supervision.targets, reduction="sum")
    loss = objective.alpha * nll + (1 - objective.alpha) * objective.temperature**2 * divergence
    return loss, nll, divergence


def run_head(student: list[Tensor], supervision: DistillationTargets, **options: Any) -> DistillationSums:
    hidden, weight, bias = student
    return compute_distillation(hidden, weight, supervision, bias=bias, **options)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distillation_head_equals_dense_computation(objective, options, chunk_size) -> None:
    student, supervision = make_student(), make_supervision(objective, logit_scale=0.5, softcap=2.0)
    sums = run_head(student, supervision, chunk_size=chunk_size, **options)
    loss, nll, divergence = dense_loss(student, supervision, options)
    expected = [each.detach() for each in (loss, nll, divergence)]
    torch.testing.assert_close([sums.loss_sum.detach(), sums.nll_sum, sums.divergence_sum], expected)
    assert not any(figure.requires_grad for figure in sums[1:])
    for gradient, wanted in zip(
        torch.autograd.grad(sums.loss_sum * 3, student), torch.autograd.grad(loss * 3, student), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("chunk_size", [5, None])
def test_distillation_metrics_equal_dense_computation(chunk_size: int | None) -> None:
    student, supervision = make_student(), make_supervision(OBJECTIVES[0])
    teacher = supervision.teacher
    logits, teacher_logits = dense_logits(*student), dense_logits(teacher.hidden, teacher.weight, **teacher.transform)
    supervision.targets[:6] = logits[:6, :SHARED].argmax(-1)
    sums = run_head(student, supervision, chunk_size=chunk_size)
    torch.testing.assert_close(
        sums.teacher_nll_sum, functional.cross_entropy(teacher_logits, supervision.targets, reduction="sum")
    )
    choice = logits.argmax(-1)
    assert sums.num_correct == (choice == supervision.targets).sum()
    assert sums.num_agreed == (choice == teacher_logits.argmax(-1)).sum() > 1
    assert sums.num_targets == NUM_TOKENS


def from_logits(student: list[float], teacher: list[float], objective: Objective) -> tuple[DistillationSums, Tensor]:
    """Run the head on given logits, as weights of one token whose hidden state is 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor(student, dtype=torch.float64)[:, None].requires_grad_()
    head = TeacherHead(one, torch.tensor(teacher, dtype=torch.float64)[:, None])
    return compute_distillation(one, weight, DistillationTargets(torch.tensor([0]), head, objective)), weight


@pytest.mark.parametrize(
    ("alpha", "temperature", "expected"),
    [
        (0.0, 1.0, 0.119630),
        (0.0, 2.0, 0.123962),
        (0.0, 4.0, 0.119818),
        (0.0, 1e5, 0.111111),  # Half the variance of the difference of the logits.
        (1.0, 1.0, 0.861995),
        (0.5, 2.0, 0.492979),
    ],
)
def test_hinton_loss_closed_forms(alpha: float, temperature: float, expected: float) -> None:
    sums, _ = from_logits([1.0, 1.0, 0.0], [2.0, 1.0, 0.0], Objective(alpha, 0.0, temperature))
    assert sums.loss_sum.item() == pytest.approx(expected, abs=2e-6)


def test_optimum_is_mean_of_label_and_teacher() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    head = TeacherHead(one, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()[:, None])
    supervision = DistillationTargets(torch.tensor([1]), head, Objective(alpha=0.5))
    optimizer = torch.optim.LBFGS([weight], max_iter=200, tolerance_grad=1e-12)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute_distillation(one, weight, supervision).loss_sum
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = torch.tensor([0.3, 0.65, 0.05], dtype=torch.float64)
    torch.testing.assert_close(weight.detach().squeeze(1).softmax(0), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation_head_in_bfloat16_accumulates_in_float32(dtype: torch.dtype) -> None:
    student, supervision = make_student(torch.float32), make_supervision(OBJECTIVES[0], torch.float32)
    exact = run_head(student, supervision)
    narrow = make_student(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        rounded = run_head(narrow, make_supervision(OBJECTIVES[0], dtype), chunk_size=5)
    assert {figure.dtype for figure in rounded[:4]} == {torch.float32}
    assert rounded.teacher_nll_sum != exact.teacher_nll_sum
    torch.testing.assert_close(rounded.loss_sum, exact.loss_sum, rtol=2e-2, atol=0)
    for gradient, expected in zip(
        torch.autograd.grad(rounded.loss_sum, narrow), torch.autograd.grad(exact.loss_sum, student), strict=True
    ):
        assert (gradient - expected).norm() < 3e-2 * expected.norm()


def test_distillation_head_without_targets_is_differentiable_zero() -> None:
    student, supervision = make_student(), make_supervision(OBJECTIVES[0])
    empty = TeacherHead(supervision.teacher.hidden[:0], supervision.teacher.weight)
    sums = compute_distillation(
        student[0][:0], student[1], DistillationTargets(supervision.targets[:0], empty, supervision.objective)
    )
    assert [figure.item() for figure in sums] == [0] * 7
    assert torch.autograd.grad(sums.loss_sum, student[1])[0].eq(0).all()


def test_evaluation_has_no_gradient_and_second_backward_raises() -> None:
    student, supervision = make_student(), make_supervision(OBJECTIVES[0])
    with torch.no_grad():
        assert run_head(student, supervision).loss_sum.grad_fn is None
    loss = run_head(student, supervision).loss_sum
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_head_allocates_at_most_one_chunk_of_logits(beta: float) -> None:
    chunk_size, vocabulary = 8, 1000
    sizes = []
    for num_tokens in (64, 256):
        hidden, weight = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
        head = TeacherHead(torch.randn(num_tokens, 4), torch.randn(vocabulary, 4), {"softcap": 3.0})
        supervision = DistillationTargets(torch.randint(0, vocabulary, (num_tokens,)), head, Objective(0.5, beta, 2.0))
        with LargestTensor() as largest:
            compute_distillation(hidden, weight, supervision, chunk_size=chunk_size).loss_sum.backward()
        sizes.append(largest.numel)
    assert sizes == [chunk_size * vocabulary] * 2

"""Distillation from stored top-k probabilities with a tail bucket, against torch and the live loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.losses.test_distillation import OBJECTIVES, OPTIONS, SHARED, make_student, make_supervision, run_head
from tests.losses.test_divergence import dense_divergence
from tests.losses.test_projection import LargestTensor
from torch.nn import functional

from recipes_lib.losses.distillation import (
    MIN_LOG_TAIL,
    DistillationTargets,
    Objective,
    TeacherHead,
    TopLogps,
    compute_distillation,
    compute_top_divergence,
    compute_top_logps,
)


def keep_top(supervision: DistillationTargets, k: int, **changes: Any) -> DistillationTargets:
    """The same supervision with the teacher's top k log-probabilities only."""
    head = supervision.teacher
    assert isinstance(head, TeacherHead)
    temperature = supervision.objective.temperature
    top = compute_top_logps(
        head.hidden, head.weight, supervision.targets, k=k, temperature=temperature, **head.transform
    )
    return DistillationTargets(supervision.targets, top._replace(**changes), supervision.objective)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_top_k_equals_torch(dtype: torch.dtype) -> None:
    """A teacher in bfloat16 has ``float32`` log-probabilities of its rounded logits."""
    supervision = make_supervision(Objective(temperature=2.0), dtype)
    head, top = supervision.teacher, keep_top(supervision, 5).teacher
    assert isinstance(top, TopLogps)
    wide = torch.promote_types(dtype, torch.float32)
    logits = functional.linear(head.hidden, head.weight).to(wide) + head.transform["bias"]
    logps = (logits / 2).log_softmax(-1)
    values, ids = logps.topk(5)
    torch.testing.assert_close((top.logps, top.ids), (values, ids))
    torch.testing.assert_close(top.log_tails.exp(), 1 - values.exp().sum(-1))
    torch.testing.assert_close(
        top.target_logps, -functional.cross_entropy(logits, supervision.targets, reduction="none")
    )
    assert top.num_tokens == SHARED


@pytest.mark.parametrize("chunk_size", [4, None])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_top_k_of_full_vocabulary_equals_live_loss(objective, options, chunk_size) -> None:
    student, supervision = make_student(), make_supervision(objective, logit_scale=0.5, softcap=2.0)
    live, stored = (
        run_head(student, each, chunk_size=chunk_size, **options)
        for each in (supervision, keep_top(supervision, SHARED))
    )
    torch.testing.assert_close([*live], [*stored])
    for one, other in zip(
        torch.autograd.grad(live.loss_sum, student), torch.autograd.grad(stored.loss_sum, student), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("k", [1, 6])
def test_top_k_gradient_equals_autograd(k: int, beta: float) -> None:
    student, supervision = make_student(), keep_top(make_supervision(Objective(0.0, beta, 2.0)), k)
    top = supervision.teacher
    assert isinstance(top, TopLogps)
    logps = (functional.linear(*student)[:, :SHARED] / 2).log_softmax(-1)
    picked = logps.gather(1, top.ids)
    rest = logps.scatter(1, top.ids, -torch.inf).logsumexp(-1, keepdim=True)
    student_logps = torch.cat([picked, rest], dim=-1)
    teacher_logps = torch.cat([top.logps, top.log_tails[:, None]], dim=-1)
    divergence = dense_divergence(teacher_logps, student_logps, beta).sum()
    sums = run_head(student, supervision, chunk_size=5)
    torch.testing.assert_close(sums.divergence_sum, divergence.detach())
    expected = torch.autograd.grad(4 * divergence, student)
    for got, wanted in zip(torch.autograd.grad(sums.loss_sum, student), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tail_bucket_is_lower_bound_increasing_in_k(beta: float) -> None:
    student, supervision = make_student(), make_supervision(Objective(0.0, beta, 1.0))
    with torch.no_grad():
        live = run_head(student, supervision).divergence_sum.item()
        bounds = [
            run_head(student, keep_top(supervision, k)).divergence_sum.item() for k in (1, 2, 4, 8, 16, 32, SHARED)
        ]
    assert all(lower <= higher + 1e-12 for lower, higher in zip(bounds, [*bounds[1:], live], strict=True))
    assert bounds[0] < 0.9 * live
    assert bounds[-1] == pytest.approx(live)


def test_top_k_divergence_of_a_position_ignores_the_level_of_its_logits() -> None:
    top = compute_top_logps(torch.randn(2, 6), torch.eye(6), torch.zeros(2, dtype=torch.int64), k=2, temperature=1.0)
    logits = torch.randn(2, 6)
    expected = compute_top_divergence(logits.clone(), top, 0.5)
    shifted = compute_top_divergence(logits + torch.tensor([[0.0], [512.0]]), top, 0.5)
    torch.testing.assert_close(shifted, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_empty_tail_is_finite(beta: float) -> None:
    logits = torch.zeros(2, 6)
    logits[:, 0] = 300.0
    top = compute_top_logps(logits, torch.eye(6), torch.zeros(2, dtype=torch.int64), k=1, temperature=1.0)
    assert top.log_tails.tolist() == [MIN_LOG_TAIL] * 2
    for student in (logits.flip(1), logits, torch.zeros(2, 6)):
        values, gradient = compute_top_divergence(student.clone(), top, beta)
        assert values.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_token_whose_probability_underflows_has_the_divergence_of_the_whole_vocabulary(beta: float) -> None:
    teacher, student = torch.tensor([[0.0, -200.0, -1.0]]), torch.tensor([[-150.0, 0.0, -149.0]])
    top = compute_top_logps(teacher, torch.eye(3), torch.zeros(1, dtype=torch.int64), k=3, temperature=1.0)
    expected = dense_divergence(teacher.log_softmax(-1), student.log_softmax(-1), beta)
    torch.testing.assert_close(compute_top_divergence(student, top, beta)[0], expected)


def test_top_k_allocates_at_most_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, vocabulary, num_tokens = 8, 1000, 64
    monkeypatch.setattr("recipes_lib.losses.projection.CHUNK_BYTES", 4 * chunk * vocabulary)
    monkeypatch.setattr("recipes_lib.losses.projection.MIN_CHUNK_TOKENS", 1)
    hidden, weight = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    with LargestTensor() as largest:
        top = compute_top_logps(torch.randn(num_tokens, 4), torch.randn(vocabulary, 4), targets, k=3, temperature=1.0)
        compute_distillation(hidden, weight, DistillationTargets(targets, top, Objective(0.5))).loss_sum.backward()
    assert largest.numel == chunk * vocabulary

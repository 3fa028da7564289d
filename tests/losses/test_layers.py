"""Relational and attention losses within documents, against their definitions in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from recipes_lib.losses.distillation import MAX_ANGLE_TOKENS, compute_attention_sum, compute_relation_sum

SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "similarity": partial(compute_relation_sum, kind="similarity"),
    "distance": partial(compute_relation_sum, kind="distance"),
    "angle": partial(compute_relation_sum, kind="angle"),
}
STATES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relate(name: str, states: np.ndarray) -> np.ndarray:
    """All relations of a document by their definitions, in loops."""
    size = len(states)
    if name == "similarity":
        return np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in states] for a in states])
    if name == "distance":
        distances = np.array([[np.linalg.norm(a - b) for b in states] for a in states])
        return distances / distances[distances > 0].mean() if size > 1 else distances
    angles = np.zeros((size, size, size))
    for at, one, other in itertools.product(range(size), repeat=3):
        to_one, to_other = states[one] - states[at], states[other] - states[at]
        if at not in (one, other):
            angles[at, one, other] = to_one @ to_other / np.linalg.norm(to_one) / np.linalg.norm(to_other)
    return angles


def compare(name: str, student: np.ndarray, teacher: np.ndarray) -> float:
    gap = np.abs(relate(name, student) - relate(name, teacher))
    loss = gap**2 if name == "similarity" else np.where(gap < 1, gap**2 / 2, gap - 0.5)
    return float(loss.mean())


@pytest.mark.parametrize("name", SUMS)
def test_relational_loss_equals_numpy_definition_per_document(name) -> None:
    lengths = [5, 1, 4]
    student, teacher = 3 * draw(10, 3, seed=0), draw(10, 6, seed=1)
    bounds = list(itertools.pairwise(np.cumsum([0, *lengths])))
    expected = sum((end - at) * compare(name, student[at:end].numpy(), teacher[at:end].numpy()) for at, end in bounds)
    assert float(SUMS[name](student, teacher, lengths)) == pytest.approx(expected, rel=1e-10)
    one_document = SUMS[name](student, teacher, [10])
    assert abs(float(one_document) - expected) > 1e-3


@pytest.mark.parametrize("name", SUMS)
def test_relational_loss_is_zero_for_equal_states(name) -> None:
    states = draw(7, 6, seed=4).float()
    states[2] = states[1]
    student = states.clone().requires_grad_()
    loss = SUMS[name](student, states, [4, 3])
    loss.backward()
    assert loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize("name", SUMS)
def test_identical_student_tokens_have_finite_gradients(name) -> None:
    student = draw(5, 3, seed=7)
    student[3] = student[1]
    student.requires_grad_()
    SUMS[name](student, draw(5, 3, seed=8), [5]).backward()
    assert student.grad.isfinite().all()
    assert student.grad.abs().max() < 100


@pytest.mark.parametrize("name", SUMS)
def test_relational_loss_is_independent_of_document_order(name) -> None:
    student, teacher = draw(9, 3, seed=9), draw(9, 5, seed=10)
    expected = SUMS[name](student, teacher, [4, 5])
    turned = torch.arange(9).roll(-4)
    torch.testing.assert_close(SUMS[name](student[turned], teacher[turned], [5, 4]), expected)
    empty = torch.zeros(0, 3, requires_grad=True)
    assert SUMS[name](empty, torch.zeros(0, 5), []).item() == 0


def test_long_document_is_subsampled_evenly() -> None:
    length = 3 * MAX_ANGLE_TOKENS
    student, teacher = draw(length, 3, seed=11), draw(length, 5, seed=12)
    got = compute_relation_sum(student, teacher, [length], "angle")
    torch.testing.assert_close(got, 3 * compute_relation_sum(student[::3], teacher[::3], [MAX_ANGLE_TOKENS], "angle"))


def test_attention_loss_is_kl_over_visible_keys() -> None:
    generator = np.random.default_rng(0)
    seen = np.tril(np.ones((5, 5)))
    student, teacher = (generator.random((5, 5)) * seen for _ in range(2))
    student, teacher = (probs / probs.sum(axis=1, keepdims=True) for probs in (student, teacher))
    expected = sum(
        teacher[query, key] * np.log(teacher[query, key] / student[query, key])
        for query in range(5)
        for key in range(query + 1)
    )
    got = compute_attention_sum(torch.from_numpy(student), torch.from_numpy(teacher))
    assert float(got) == pytest.approx(expected, rel=1e-12)
    alone = compute_attention_sum(torch.from_numpy(student[:1]), torch.from_numpy(teacher[:1]))
    assert float(alone) == 0


def test_attention_loss_is_finite_for_zero_student_attention() -> None:
    student = torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = compute_attention_sum(student, torch.tensor([[0.5, 0.5]]))
    loss.backward()
    assert 40 < loss.item() < 50
    assert student.grad.isfinite().all()

"""Chunked next-token cross-entropy against torch's, in values, gradients and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.losses import test_token_logps
from tests.losses.test_token_logps import GRID, WIDTH, dense_logits, gradients_of
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile

from recipes_lib.losses.next_token import TokenSums, compute_cross_entropy


def make_inputs(*options: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias, targets = test_token_logps.make_inputs(*options)
    targets[::4] = -100
    return hidden, weight, bias, targets


def dense_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Any = None, **options: Any) -> Tensor:
    logits = dense_logits(hidden, weight, bias, **options)
    return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(("options", "dtype", "chunk_size"), GRID)
def test_cross_entropy_and_gradients_equal_torch(options, dtype, chunk_size) -> None:
    *inputs, targets = make_inputs(dtype)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    hidden, weight, bias = inputs
    ours = compute_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **options)
    expected = dense_cross_entropy(hidden, weight, targets, bias, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours.nll_sum, expected, **tolerance)
    torch.testing.assert_close(
        gradients_of(3.5 * ours.nll_sum, *inputs), gradients_of(3.5 * expected, *inputs), **tolerance
    )


def test_counts_are_number_of_targets_and_argmax_hits() -> None:
    hidden, weight, _, targets = make_inputs()
    logits = hidden @ weight.t()
    targets[1::4] = logits.argmax(-1)[1::4]
    sums = compute_cross_entropy(hidden, weight, targets, chunk_size=5)
    assert sums.num_targets.item() == (targets != -100).sum()
    assert sums.num_correct.item() == (logits.argmax(-1) == targets).sum() >= 6


def test_argmax_hit_is_first_of_equal_logits() -> None:
    hidden, weight = torch.ones(2, 3), torch.ones(5, 3)
    assert compute_cross_entropy(hidden, weight, torch.tensor([0, 4])).num_correct.item() == 1


def test_ignored_positions_have_no_effect() -> None:
    hidden, weight, _, targets = make_inputs()
    hidden.requires_grad_()
    keep = targets != -100
    alone = compute_cross_entropy(hidden[keep], weight, targets[keep])
    noisy = hidden.detach().clone()
    noisy[~keep] = math.nan
    assert compute_cross_entropy(noisy, weight, targets) == alone
    (gradient,) = gradients_of(compute_cross_entropy(hidden, weight, targets).nll_sum, hidden)
    assert gradient[~keep].eq(0).all()
    assert gradient[keep].ne(0).any(dim=-1).all()


def test_cross_entropy_without_targets_is_differentiable_zero() -> None:
    hidden, weight, _, targets = make_inputs(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    sums = compute_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert [value.item() for value in sums[:3]] == [0.0, 0, 0]
    for gradient in gradients_of(sums.nll_sum, hidden, weight):
        assert gradient.eq(0).all()


def test_frozen_weight_gets_no_gradient_and_no_buffer() -> None:
    hidden, weight, _, targets = make_inputs()
    hidden.requires_grad_()
    sums = compute_cross_entropy(hidden, weight, targets)
    assert [None if saved is None else saved.shape for saved in saved_tensors(sums)] == [(17, WIDTH), None, None]
    expected = gradients_of(dense_cross_entropy(hidden, weight, targets), hidden)
    torch.testing.assert_close(gradients_of(sums.nll_sum, hidden), expected)


def test_evaluation_has_equal_sums_with_one_projection() -> None:
    hidden, weight, _, targets = make_inputs()
    weight.requires_grad_()
    with profile() as training:
        trained = compute_cross_entropy(hidden.requires_grad_(), weight, targets)
    with torch.no_grad(), profile() as evaluation:
        evaluated = compute_cross_entropy(hidden, weight, targets)
    assert evaluated.nll_sum.grad_fn is None
    assert evaluated == trained
    products = [
        sum(event.name in ("aten::mm", "aten::addmm_") for event in run.events()) for run in (training, evaluation)
    ]
    assert products == [3, 1]
    assert not [event.name for event in evaluation.events() if event.name in ("aten::scatter_add_", "aten::div_")]


def saved_tensors(sums: TokenSums) -> tuple[Tensor | None, ...]:
    return sums.nll_sum.grad_fn.saved_tensors  # type: ignore[union-attr, no-any-return]


def test_second_backward_raises() -> None:
    hidden, weight, _, targets = make_inputs()
    loss = compute_cross_entropy(hidden.requires_grad_(), weight, targets).nll_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cross_entropy_cannot_be_differentiated_twice() -> None:
    """Its gradient is computed in the forward pass, so a second derivative would lack the Hessian."""
    hidden, weight, _, targets = make_inputs()
    loss = compute_cross_entropy(hidden.requires_grad_(), weight, targets).nll_sum
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("num_tokens", "vocabulary"), [(3, 1), (1, 5), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_of_smallest_and_non_contiguous_inputs(num_tokens, vocabulary, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(4, n, generator=generator).to(dtype).t() for n in (num_tokens, vocabulary))
    targets = torch.arange(num_tokens) % vocabulary
    loss = compute_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets).nll_sum
    expected = dense_cross_entropy(hidden.float(), weight.float(), targets)
    precision = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(loss, expected, **precision)
    torch.testing.assert_close(gradients_of(loss, hidden, weight), gradients_of(expected, hidden, weight), **precision)


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    hidden, weight, _, targets = make_inputs(torch.float32, 1e4)
    hidden.requires_grad_()
    loss = compute_cross_entropy(hidden, weight, targets).nll_sum
    torch.testing.assert_close(loss, dense_cross_entropy(hidden, weight, targets))
    assert gradients_of(loss, hidden)[0].isfinite().all()


def test_cross_entropy_autocast_accumulates_in_float32() -> None:
    hidden, weight, bias, targets = (
        tensor.requires_grad_(tensor.is_floating_point()) for tensor in make_inputs(torch.float32)
    )
    exact = dense_cross_entropy(hidden, weight, targets, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = compute_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=5)
    assert sums.nll_sum.dtype == torch.float32
    torch.testing.assert_close(sums.nll_sum, exact, rtol=5e-3, atol=0)
    assert sums.nll_sum.item() != exact.item()
    for ours, expected in zip(
        gradients_of(sums.nll_sum, hidden, weight, bias), gradients_of(exact, hidden, weight, bias), strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cross_entropy_gradients_and_memory_on_cuda() -> None:
    hidden = torch.randn(2048, 64, device="cuda", requires_grad=True)
    weight = torch.randn(131072, 64, device="cuda", requires_grad=True)
    targets = torch.randint(0, 131072, (2048,), device="cuda")
    expected = gradients_of(dense_cross_entropy(hidden, weight, targets), hidden, weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compute_cross_entropy(hidden, weight, targets, chunk_size=128).nll_sum
    ours = gradients_of(loss, hidden, weight)
    assert torch.cuda.max_memory_allocated() - before < 4 * 128 * 131072 * 4
    for gradient, reference in zip(ours, expected, strict=True):
        assert (gradient - reference).norm() < 1e-2 * reference.norm()

"""Chunked token log-probabilities against torch's ``log_softmax``, in values, gradients and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile

from recipes_lib.losses.next_token import compute_token_logps

NUM_TOKENS, WIDTH, VOCABULARY = 23, 12, 57
OPTIONS = [{}, {"logit_scale": 0.3}, {"softcap": 2.5}, {"logit_scale": 1.7, "softcap": 1.5}]
GRID = [
    *((options, torch.float64, chunk_size) for options in OPTIONS for chunk_size in (1, 7, None)),
    (OPTIONS[-1], torch.float32, 7),
]
"""Transform of the logits, dtype and chunk size: 23 tokens are 23 chunks, three full and one partial chunk, or one."""


def make_inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    return [(hidden * scale).to(dtype), weight.to(dtype), bias.to(dtype), targets]


def make_leaves(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
    *tensors, targets = make_inputs(dtype, scale)
    return [tensor.requires_grad_() for tensor in tensors], targets


def dense_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, logit_scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    logits = functional.linear(hidden, weight, bias) * logit_scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def dense_logps(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return dense_logits(hidden, weight, bias, **options).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def preference_loss(logps: Tensor) -> Tensor:
    """A function of the log-probabilities whose gradient has both signs and depends on their values."""
    chosen, rejected = logps[: len(logps) // 2].sum(), logps[len(logps) // 2 :].sum()
    return -functional.logsigmoid(0.1 * (chosen - rejected)) + (logps.exp() ** 2).sum()


def gradients_of(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs, retain_graph=True))


# Gradients of a frozen weight are computed in the forward pass.
TRAINED = [(case, trained) for case in GRID for trained in ((True, True, True), (True, False, False))]
TRAINED += [(GRID[-2], trained) for trained in ((False, True, False), (True, False, True))]


@pytest.mark.parametrize(("case", "trained"), TRAINED)
def test_logps_and_gradients_equal_torch(case, trained) -> None:
    options, dtype, chunk_size = case
    hidden, weight, bias, targets = make_inputs(dtype)
    inputs = [
        tensor.requires_grad_() for tensor, is_leaf in zip((hidden, weight, bias), trained, strict=True) if is_leaf
    ]
    ours = compute_token_logps(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **options).logps
    expected = dense_logps(hidden, weight, targets, bias, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, **tolerance)
    upstream = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for function in (preference_loss, lambda logps: (logps * upstream).sum()):
        torch.testing.assert_close(
            gradients_of(function(ours), *inputs), gradients_of(function(expected), *inputs), **tolerance
        )


@pytest.mark.parametrize(("options", "chunk_size"), [({}, 1000), (OPTIONS[-1], 5)])
def test_frozen_weight_keeps_gradients_without_second_projection(options: dict[str, float], chunk_size: int) -> None:
    (hidden, weight, bias), targets = make_leaves()
    frozen = (hidden, weight.detach(), bias.detach())
    products, gradients, values = [], [], []
    for inputs in ((hidden, weight, bias), frozen):
        logps = compute_token_logps(*inputs[:2], targets, bias=inputs[2], chunk_size=chunk_size, **options).logps
        with profile() as backward:
            gradients += gradients_of(preference_loss(logps), hidden)
        values.append(logps.detach())
        products.append(sum(event.name in ("aten::mm", "aten::addmm_") for event in backward.events()))
    assert torch.equal(*values)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    num_chunks = math.ceil(NUM_TOKENS / chunk_size)
    assert products == [3 * num_chunks, 0]


def test_frozen_weight_saves_one_hidden_row_per_token() -> None:
    (hidden, weight, bias), targets = make_leaves()
    frozen = compute_token_logps(hidden, weight.detach(), targets, bias=bias.detach()).logps
    assert [saved.shape for saved in frozen.grad_fn.saved_tensors] == [(NUM_TOKENS, WIDTH)]
    trained = compute_token_logps(hidden, weight, targets, bias=bias).logps
    own_memory = [saved for saved in trained.grad_fn.saved_tensors if not any(saved is t for t in (weight, bias))]
    assert sum(saved.numel() for saved in own_memory) == NUM_TOKENS * (WIDTH + 2)


@pytest.mark.parametrize("with_frozen_weight", [False, True])
def test_logps_evaluation_is_one_projection(with_frozen_weight: bool) -> None:
    (hidden, weight, _), targets = make_leaves()
    weight = weight.detach() if with_frozen_weight else weight
    trained = compute_token_logps(hidden, weight, targets).logps
    with torch.no_grad(), profile() as evaluation:
        evaluated = compute_token_logps(hidden, weight, targets).logps
    assert evaluated.grad_fn is None
    assert torch.equal(evaluated, trained)
    assert sum(event.name in ("aten::mm", "aten::addmm_") for event in evaluation.events()) == 1


@pytest.mark.parametrize("with_frozen_weight", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_statistics_equal_dense_distribution(options: dict[str, float], with_frozen_weight: bool) -> None:
    (hidden, weight, bias), targets = make_leaves()
    if with_frozen_weight:
        weight, bias = weight.detach(), bias.detach()
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    distribution = dense_logits(hidden, weight, bias, **options).log_softmax(-1)
    targets[::3] = distribution.argmax(dim=-1)[::3]
    plain = compute_token_logps(hidden, weight, targets, bias=bias, chunk_size=5, **options)
    full = compute_token_logps(hidden, weight, targets, bias=bias, chunk_size=5, with_statistics=True, **options)
    assert plain.log_sum_sq_probs is None
    assert plain.entropy is None
    for scored in (plain, full):
        assert torch.equal(scored.is_top, distribution.argmax(dim=-1) == targets)
    assert torch.equal(full.logps, plain.logps)
    expected = dense_logps(hidden, weight, targets, bias, **options)
    torch.testing.assert_close(
        gradients_of(preference_loss(full.logps), *inputs), gradients_of(preference_loss(expected), *inputs)
    )
    assert not full.log_sum_sq_probs.requires_grad
    assert not full.entropy.requires_grad
    torch.testing.assert_close(full.log_sum_sq_probs, distribution.exp().square().sum(dim=-1).log().detach())
    torch.testing.assert_close(full.entropy, -(distribution.exp() * distribution).sum(dim=-1).detach())


def test_uniform_distribution_has_entropy_log_n() -> None:
    scored = compute_token_logps(torch.zeros(2, 3), torch.ones(8, 3), torch.tensor([0, 7]), with_statistics=True)
    expected = torch.full((2,), math.log(8))
    torch.testing.assert_close((-scored.logps, scored.entropy, -scored.log_sum_sq_probs), (expected,) * 3)
    assert scored.is_top.tolist() == [True, False], "only the first of equal logits is the arg-max"


@pytest.mark.parametrize("with_frozen_weight", [False, True])
def test_logps_without_tokens_are_differentiable(with_frozen_weight: bool) -> None:
    (hidden, weight, bias), targets = make_leaves(torch.float32)
    if with_frozen_weight:
        weight, bias = weight.detach(), bias.detach()
    scored = compute_token_logps(hidden[:0], weight, targets[:0], bias=bias, with_statistics=True)
    assert [len(figure) for figure in scored[:4]] == [0, 0, 0, 0]
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    for gradient in gradients_of(scored.logps.sum(), *inputs):
        assert gradient.eq(0).all()


@pytest.mark.parametrize("with_frozen_weight", [False, True])
def test_backward_can_be_repeated_but_not_differentiated(with_frozen_weight: bool) -> None:
    (hidden, weight, _), targets = make_leaves()
    logps = compute_token_logps(hidden, weight.detach() if with_frozen_weight else weight, targets).logps
    assert torch.equal(*(gradients_of(preference_loss(logps), hidden)[0] for _ in range(2)))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(logps.sum(), hidden, create_graph=True)


def test_negative_target_is_refused() -> None:
    hidden, weight, _, targets = make_inputs()
    targets[3] = -100
    with pytest.raises(RuntimeError, match="out of bounds"):
        compute_token_logps(hidden, weight, targets)


@pytest.mark.parametrize("with_frozen_weight", [False, True])
def test_logps_of_huge_logits_are_finite(with_frozen_weight: bool) -> None:
    (hidden, weight, _), targets = make_leaves(torch.float32, scale=1e4)
    weight = weight.detach() if with_frozen_weight else weight
    scored = compute_token_logps(hidden, weight, targets, with_statistics=True)
    torch.testing.assert_close(scored.logps, dense_logps(hidden, weight, targets))
    assert gradients_of(scored.logps.sum(), hidden)[0].isfinite().all()
    assert scored.entropy.isfinite().all()
    assert scored.log_sum_sq_probs.isfinite().all()


def test_statistics_of_masked_tokens_are_finite() -> None:
    (hidden, weight, bias), targets = make_leaves()
    bias = bias.detach().index_fill(0, torch.tensor([3, 40]), -math.inf)
    targets[(targets == 3) | (targets == 40)] = 4
    scored = compute_token_logps(hidden, weight, targets, bias=bias, with_statistics=True)
    expected = torch.distributions.Categorical(logits=dense_logits(hidden, weight, bias))
    torch.testing.assert_close(scored.logps, expected.log_prob(targets))
    torch.testing.assert_close(scored.entropy, expected.entropy().detach())
    assert gradients_of(scored.logps.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("with_frozen_weight", [False, True])
def test_logps_autocast_accumulates_in_float32(with_frozen_weight: bool) -> None:
    inputs, targets = make_leaves(torch.float32)
    if with_frozen_weight:
        inputs = [inputs[0], inputs[1].detach(), inputs[2].detach()]
    hidden, weight, bias = inputs
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    exact = dense_logps(hidden, weight, targets, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = compute_token_logps(hidden, weight, targets, bias=bias, chunk_size=5).logps
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, rtol=2e-2, atol=5e-2)
    assert not torch.equal(ours, exact)
    # Backward runs outside of autocast, and must recompute the same logits.
    upstream = torch.linspace(-1, 1, NUM_TOKENS)
    for gradient, expected in zip(
        gradients_of((ours * upstream).sum(), *leaves), gradients_of((exact * upstream).sum(), *leaves), strict=True
    ):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() < 1e-2 * expected.norm()

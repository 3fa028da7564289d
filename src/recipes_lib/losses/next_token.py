"""Next-token cross-entropy over a large vocabulary, a few hundred tokens of logits at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 128 * 2**20
"""Default size of the ``float32`` logits that exist at any one time."""
MIN_CHUNK_TOKENS = 128
"""A smaller chunk would read the whole weight for too little arithmetic."""


class TokenSums(NamedTuple):
    """Sums over the target tokens; add them over batches and processes, then divide.

    Attributes:
        nll_sum: Negative log-likelihood in nats; ``float32`` scalar, differentiable.
        num_targets: Tokens that were scored; ``int64`` scalar.
        num_correct: Targets that are the arg-max of their logits; ``int64`` scalar.
    """

    nll_sum: Tensor
    num_targets: Tensor
    num_correct: Tensor


# How many targets a batch has differs from batch to batch: compiled, every number of them would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> TokenSums:
    """Sum of the cross-entropies of ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, in nats.

    Only target positions are projected, ``chunk_size`` at a time. Gradients are made in the forward pass, while the
    logits are there; backward multiplies them, in place, and so can run once. Matrix products run in autocast's dtype
    (without autocast, in the narrower of the operands' two); everything else, and the sum of the weight's gradient
    over chunks, in ``float32`` at least.

    Args:
        hidden: Last hidden states, ``(..., D)``, each beside the token that it predicts.
        weight: Output embedding, ``(V, D)``; may be tied to the input embedding.
        targets: Token ids, ``int64 (...)``; a negative one is not scored.
        bias: ``(V,)``.
        logit_scale: Factor on the logits, before the cap.
        softcap: Bound of the logits.
        chunk_size: Default: as many tokens as have ``CHUNK_BYTES`` of logits.

    Source: ``torch.nn.functional.cross_entropy``; ``tests/losses/test_next_token.py``.
    """
    is_target = targets >= 0
    projection = _Projection(
        dtype=_matmul_dtype(hidden, weight),
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_size=chunk_size or max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * len(weight))),
    )
    nll_sum, num_correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden[is_target], weight, bias, targets[is_target], projection, torch.is_grad_enabled()
    )
    return TokenSums(nll_sum, is_target.sum(), num_correct)


def _matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)


class _Projection(NamedTuple):
    """How hidden states become logits."""

    dtype: torch.dtype
    logit_scale: float
    softcap: float | None
    chunk_size: int


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: _Projection,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(projection.dtype, torch.float32)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=dtype) if tensor is not None and needed and is_grad_enabled else None
            for tensor, needed, dtype in zip(
                (hidden, weight, bias), ctx.needs_input_grad, (hidden.dtype, wide, wide), strict=False
            )
        )
        nll_sum = hidden.new_zeros((), dtype=wide)
        num_correct = targets.new_zeros(())
        matrix = weight.to(projection.dtype)
        # One buffer for all chunks: fresh memory of this size costs the operating system as much as the arithmetic.
        shape = (min(projection.chunk_size, len(hidden)), len(weight))
        wide_buffer = hidden.new_empty(shape, dtype=wide)
        buffer = wide_buffer if projection.dtype == wide else hidden.new_empty(shape, dtype=projection.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), projection.chunk_size):
                rows = slice(start, start + projection.chunk_size)
                inputs, chunk_targets = hidden[rows].to(projection.dtype), targets[rows, None]
                narrow, logits = buffer[: len(inputs)], wide_buffer[: len(inputs)]
                torch.mm(inputs, matrix.t(), out=narrow)
                slope = _finish_logits(logits.copy_(narrow), bias, projection)

                top, best = logits.max(dim=-1, keepdim=True)
                num_correct += (best == chunk_targets).sum()
                nll_sum += (top - logits.gather(1, chunk_targets)).sum()
                total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
                nll_sum += total.log().sum()
                if not (is_grad_enabled and any(ctx.needs_input_grad)):
                    continue

                # The logits become their own gradient: softmax minus one-hot.
                logits.div_(total).scatter_add_(1, chunk_targets, -torch.ones_like(top))
                logits.mul_(projection.logit_scale if slope is None else slope.mul_(projection.logit_scale))
                narrow.copy_(logits)
                if grad_hidden is not None:
                    grad_hidden[rows] = narrow @ matrix
                if grad_weight is not None:
                    _add_weight_gradient(grad_weight, logits, narrow, inputs)
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(num_correct)
        return nll_sum, num_correct

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place, for a second V x D tensor would come just when activations peak. Should backward run again,
        # autograd finds the saved tensors changed and raises.
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None)


def _finish_logits(logits: Tensor, bias: Tensor | None, projection: _Projection) -> Tensor | None:
    """Apply bias, scale and cap in place; return the cap's derivative."""
    if bias is not None:
        logits.add_(bias)
    if projection.logit_scale != 1.0:
        logits.mul_(projection.logit_scale)
    if projection.softcap is None:
        return None
    logits.div_(projection.softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(projection.softcap)
    return slope


def _add_weight_gradient(total: Tensor, wide: Tensor, narrow: Tensor, inputs: Tensor) -> None:
    """Add a chunk's share, ``wide.t() @ inputs``, without rounding it to the matrix product's dtype first."""
    if total.is_cuda and narrow.dtype != total.dtype:
        torch.addmm(total, narrow.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(wide.t(), inputs.to(total.dtype))

"""Log-probability of every target token over a large vocabulary, differentiable for any function of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.losses.projection import Projection, ProjectionGradients, build_projection


class TokenLogps(NamedTuple):
    """What a model says of ``N`` target tokens.

    Attributes:
        logps: ``log p(target)`` in nats; ``float32 (N,)``, differentiable.
        is_top: Whether the target is the arg-max of its logits; ``bool (N,)``.
        log_sum_sq_probs: ``log sum_v p(v)^2``; ``float32 (N,)``, without gradient; ``None`` unless asked for.
        entropy: ``-sum_v p(v) log p(v)`` in nats; ``float32 (N,)``, without gradient; ``None`` unless asked for.
    """

    logps: Tensor
    is_top: Tensor
    log_sum_sq_probs: Tensor | None
    entropy: Tensor | None


# How many targets a batch has differs from batch to batch: compiled, every number of them would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_token_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    with_statistics: bool = False,
) -> TokenLogps:
    """Log-probabilities under ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, in nats.

    Never more than ``chunk_size`` tokens' logits exist. What will be done with the log-probabilities is not known
    here: when neither weight nor bias needs a gradient, the forward pass makes each token's own gradient while its
    logits are there, ``(N, D)``, and backward scales them; otherwise backward makes the logits again. Backward may run
    more than once. Matrix products run in autocast's dtype (without autocast, in
    the narrower of the operands' two); everything else, and the sum of the weight's gradient over chunks, in
    ``float32`` at least.

    Args:
        hidden: Last hidden states, ``(N, D)``, each beside the token that it predicts; ``N`` may be 0.
        weight: Output embedding, ``(V, D)``; may be tied to the input embedding.
        targets: Token ids, ``int64 (N,)``; every one is scored, so none is negative.
        bias: ``(V,)``.
        logit_scale: Factor on the logits, before the cap.
        softcap: Bound of the logits.
        chunk_size: Default: as many tokens as have ``CHUNK_BYTES`` of logits.
        with_statistics: Compute ``log_sum_sq_probs`` and ``entropy`` too, which takes another chunk of memory.

    Raises:
        RuntimeError: A target is not in the vocabulary; in backward: it runs with ``create_graph``.

    Source: ``log_softmax`` and ``gather`` of torch; ``tests/losses/test_token_logps.py``.
    """
    projection = build_projection(hidden, weight, logit_scale=logit_scale, softcap=softcap, chunk_size=chunk_size)
    return TokenLogps(
        *_ChunkedLogps.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, projection, torch.is_grad_enabled(), with_statistics
        )
    )


class _ChunkedLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: Projection,
        is_grad_enabled: bool,
        with_statistics: bool,
    ) -> tuple[Tensor | None, ...]:
        needed = [is_grad_enabled and is_needed for is_needed in ctx.needs_input_grad[:3]]
        ctx.projection, ctx.keeps_gradient = projection, needed == [True, False, False]
        gradients = ProjectionGradients(projection, hidden, weight, bias, [ctx.keeps_gradient, False, False])
        logps, log_totals, log_sum_sq_probs, entropy = (
            hidden.new_empty(len(hidden), dtype=projection.wide) for _ in range(4)
        )
        is_top = torch.empty_like(targets, dtype=torch.bool)
        matrix = weight.to(projection.dtype)
        # The statistics need the logits beside their exponentials.
        num_spare = min(projection.chunk_size, len(hidden)) if with_statistics else 0
        spare = hidden.new_empty((num_spare, len(weight)), dtype=projection.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                rows, logits, chunk_targets = chunk.rows, chunk.logits, targets[chunk.rows, None]
                top, best = logits.max(dim=-1, keepdim=True)
                is_top[rows] = (best == chunk_targets).squeeze(1)
                target_logits = logits.sub_(top).gather(1, chunk_targets)
                exponentials = torch.exp(logits, out=spare[: len(logits)] if with_statistics else logits)
                total = exponentials.sum(dim=-1, keepdim=True)
                log_total = total.log()
                logps[rows] = (target_logits - log_total).squeeze(1)
                log_totals[rows] = (top + log_total).squeeze(1)
                if with_statistics:
                    norm = torch.linalg.vector_norm(exponentials, dim=-1)
                    log_sum_sq_probs[rows] = 2 * (norm.log() - log_total.squeeze(1))
                    entropy[rows] = (log_total - logits.mul_(exponentials).sum(dim=-1, keepdim=True) / total).squeeze(1)
                if ctx.keeps_gradient:
                    # The exponentials become the gradient of their token's log-probability: one-hot minus softmax.
                    exponentials.div_(-total).scatter_add_(1, chunk_targets, torch.ones_like(top))
                    gradients.add(chunk._replace(logits=exponentials), matrix)
        if ctx.keeps_gradient:
            ctx.save_for_backward(gradients.finish()[0])
        elif any(needed):
            ctx.save_for_backward(hidden, weight, bias, targets, log_totals)
        ctx.mark_non_differentiable(is_top, log_sum_sq_probs, entropy)
        return (logps, is_top, log_sum_sq_probs, entropy) if with_statistics else (logps, is_top, None, None)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token log-probabilities cannot be differentiated twice: leave create_graph off")
        if ctx.keeps_gradient:
            (gradient,) = ctx.saved_tensors
            return (gradient * upstream[:, None]).to(gradient.dtype), *(None,) * 6
        hidden, weight, bias, targets, log_totals = ctx.saved_tensors
        projection = ctx.projection
        gradients = ProjectionGradients(projection, hidden, weight, bias, ctx.needs_input_grad[:3])
        matrix = weight.to(projection.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                rows, slopes = chunk.rows, upstream[chunk.rows, None]
                # Upstream times one-hot minus softmax.
                chunk.logits.sub_(log_totals[rows, None]).exp_().mul_(-slopes)
                chunk.logits.scatter_add_(1, targets[rows, None], slopes)
                gradients.add(chunk, matrix)
        return *gradients.finish(), *(None,) * 4

"""Next-token cross-entropy and token log-probabilities over a large vocabulary, chunked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from recipes_lib.losses.projection import (
    Chunk,
    ChunkedSum,
    LogitTransform,
    Projection,
    ProjectionGradients,
    VocabularyShard,
)


class TokenSums(NamedTuple):
    """Sums over target tokens; callers add them over micro-batches and processes, then divide.

    Attributes:
        nll_sum: Negative log-likelihood in nats; ``float32`` scalar, differentiable.
        num_targets: Scored tokens; ``int64`` scalar.
        num_correct: Targets that are the arg-max of their logits; ``int64`` scalar.
        aux_loss: Load-balancing loss of the model, which a loss head adds (``add_loss_head``); ``None`` without one.
    """

    nll_sum: Tensor
    num_targets: Tensor
    num_correct: Tensor
    aux_loss: Tensor | None = None


def index_targets(targets: Tensor) -> Tensor:
    """Return the indices of scored targets in ``targets.flatten()``, ``int64 (N,)``; synchronises with the GPU.

    Args:
        targets: Token ids, ``int64 (...)``; negative ones are not scored.
    """
    return targets.flatten().ge(0).nonzero().squeeze(1)


# The number of targets differs between batches: under torch.compile, every new number would be recompiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    positions: Tensor | None = None,
    shard: VocabularyShard | None = None,
    **transform: Unpack[LogitTransform],
) -> TokenSums:
    """Sum of cross-entropies over the targets, in nats, without logits of the whole batch.

    Only target positions are projected, ``chunk_size`` at a time. Gradients are computed in the forward pass, while the
    logits of a chunk exist; backward scales them in place and can therefore run only once. Matrix products are in
    autocast's dtype (without autocast, in the narrower dtype of the two operands); everything else, and the gradient of
    the weight summed over chunks, is in ``float32`` at least.

    Args:
        hidden: Last hidden states, ``(..., D)``, aligned with the tokens that they predict.
        weight: Output embedding, ``(V, D)``; may be tied to the input embedding.
        targets: Token ids, ``int64 (...)``; negative ones are not scored.
        positions: Indices of the scored targets in ``targets.flatten()``, ``int64 (N,)``. Default: they are searched,
            for which the host waits for the device.
        shard: Rows of the embedding that ``weight`` and ``bias`` hold, under tensor parallelism. All ranks of its group
            pass the same ``hidden`` and ``targets``, and get the same sums and the full gradient of ``hidden``.
        **transform: From hidden states to logits.

    Source: ``torch.nn.functional.cross_entropy``; ``tests/losses/test_next_token.py``.
    """
    if positions is None:
        positions = index_targets(targets)
    chosen, chosen_targets = hidden.flatten(0, -2), targets.flatten()
    if len(positions) < len(chosen_targets):
        # (N, D) and (N,). ``index_select``: its backward is ``index_add``, that of ``hidden[positions]`` sorts first.
        chosen, chosen_targets = (part.index_select(0, positions) for part in (chosen, chosen_targets))
    projection = Projection(hidden, weight, **transform)

    def compute(chunks: Iterator[Chunk], learn: Callable[[Chunk], None] | None) -> tuple[Tensor, Tensor]:
        nll_sum, num_correct = hidden.new_zeros((), dtype=projection.wide), targets.new_zeros(())
        for chunk in chunks:
            # (n, V) and (n, 1)
            logits, own_targets = chunk.logits, chosen_targets[chunk.rows, None]
            # Log-sum-exp with the maximum subtracted: no exponential overflows, and their sum is at least 1. The
            # arg-max is also the prediction, for the accuracy.
            top, best = logits.max(dim=-1, keepdim=True)
            if shard is not None:
                top, best = shard.find_top(top, best)
            num_correct += (best == own_targets).sum()
            places, is_here = (own_targets, None) if shard is None else _find_places(own_targets, logits, shard)
            # Gathered before the next line overwrites the logits: there is no memory for a second chunk of them.
            at_target = logits.gather(1, places)
            total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
            if shard is not None and is_here is not None:
                # The logit of the target is on one rank, the others add 0; each has its part of the exponentials.
                at_target, total = shard.add(at_target * is_here, total)
            # -log softmax = log(sum exp(logits - top)) + top - target.
            nll_sum += (top - at_target).sum()
            nll_sum += total.log().sum()
            if learn is not None:
                # The buffer of the logits becomes their gradient, softmax minus one-hot.
                minus = logits.new_full((), -1.0).expand_as(places) if is_here is None else -is_here
                logits.div_(total).scatter_add_(1, places, minus)
                learn(chunk)
        return nll_sum, num_correct

    nll_sum, num_correct = ChunkedSum.apply(  # type: ignore[no-untyped-call]
        chosen, weight, transform.get("bias"), projection, torch.is_grad_enabled(), compute, shard
    )
    return TokenSums(nll_sum, torch.full_like(num_correct, len(positions)), num_correct)


def _find_places(targets: Tensor, logits: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the column of each target in the shard, and 1; for targets of another shard, 0 and 0; ``(n, 1)`` each."""
    # Multiplied by 0 rather than selected by a mask, which would synchronise with the GPU.
    places = targets - shard.first
    is_here = (places >= 0) & (places < logits.shape[1])
    return places * is_here, is_here.to(logits.dtype)


@torch.no_grad()
def sample_targets(
    hidden: Tensor, weight: Tensor, generator: torch.Generator, **transform: Unpack[LogitTransform]
) -> Tensor:
    """Sample a token from the predicted distribution at each position, chunk by chunk.

    Args:
        hidden: Last hidden states, ``(N, D)``.
        weight: Output embedding, ``(V, D)``.
        generator: Random generator on the device of ``hidden``.
        **transform: From hidden states to logits.

    Returns:
        Token ids, ``int64 (N,)``.
    """
    projection = Projection(hidden, weight, **transform)
    # An empty tensor first: ``torch.cat`` raises for an empty list, which ``N = 0`` would give.
    sampled = [torch.zeros(0, dtype=torch.int64, device=hidden.device)]
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in projection.iterate(hidden, weight.to(projection.dtype), transform.get("bias")):
            sampled.append(torch.multinomial(chunk.logits.softmax(dim=-1), 1, generator=generator).squeeze(1))
    return torch.cat(sampled)


class TokenLogps(NamedTuple):
    """Log-probabilities of ``N`` target tokens.

    Attributes:
        logps: ``log p(target)`` in nats; ``float32 (N,)``, differentiable.
        is_top: Whether the target is the arg-max of its logits; ``bool (N,)``.
        log_sum_sq_probs: ``log sum_v p(v)^2``; ``float32 (N,)``, without gradient; ``None`` without statistics.
        entropy: ``-sum_v p(v) log p(v)`` in nats; ``float32 (N,)``, without gradient; ``None`` without statistics.
        aux_loss: As in ``TokenSums``.
    """

    logps: Tensor
    is_top: Tensor
    log_sum_sq_probs: Tensor | None
    entropy: Tensor | None
    aux_loss: Tensor | None = None


# The number of targets differs between batches: under torch.compile, every new number would be recompiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_token_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    with_statistics: bool = False,
    **transform: Unpack[LogitTransform],
) -> TokenLogps:
    """Log-probabilities of target tokens in nats, without logits of the whole batch.

    At most ``chunk_size`` tokens have logits at any one time. If neither weight nor bias needs a gradient, the forward
    pass stores the gradient of each log-probability with respect to its hidden state, ``(N, D)``, and backward scales
    it; otherwise backward recomputes the logits. Backward may run more than once. Dtypes as in
    ``compute_cross_entropy``.

    Args:
        hidden: Last hidden states, ``(N, D)``, aligned with the tokens that they predict; ``N`` may be 0.
        weight: Output embedding, ``(V, D)``; may be tied to the input embedding.
        targets: Token ids, ``int64 (N,)``; all are scored, none may be negative.
        with_statistics: Whether to compute ``log_sum_sq_probs`` and ``entropy``, which takes a second buffer of the
            size of a chunk.
        **transform: From hidden states to logits.

    Raises:
        RuntimeError: A target is not in the vocabulary; in backward: ``create_graph`` is set.

    Source: ``torch.log_softmax`` and ``gather``; ``tests/losses/test_token_logps.py``.
    """
    projection = Projection(hidden, weight, **transform)
    return TokenLogps(
        *_ChunkedLogps.apply(  # type: ignore[no-untyped-call]
            hidden, weight, transform.get("bias"), targets, projection, torch.is_grad_enabled(), with_statistics
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
        # The gradient of weight or bias is a sum over tokens, weighted by their upstream gradients, which are unknown
        # until backward; that of a hidden state is a single term, which backward can scale.
        ctx.projection, ctx.keeps_gradient = projection, needed == [True, False, False]
        gradients = ProjectionGradients(projection, hidden, weight, bias, [ctx.keeps_gradient, False, False])
        logps, log_totals, log_sum_sq_probs, entropy = (
            hidden.new_empty(len(hidden), dtype=projection.wide) for _ in range(4)
        )
        is_top = torch.empty_like(targets, dtype=torch.bool)
        matrix = weight.to(projection.dtype)
        # The entropy needs the logits beside their exponentials, so these get a buffer of their own.
        num_spare = min(projection.chunk_size, len(hidden)) if with_statistics else 0
        spare = hidden.new_empty((num_spare, len(weight)), dtype=projection.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                rows, logits, chunk_targets = chunk.rows, chunk.logits, targets[chunk.rows, None]
                # Subtract the maximum, so that no exponential overflows; in place, as in the cross-entropy.
                top, best = logits.max(dim=-1, keepdim=True)
                is_top[rows] = (best == chunk_targets).squeeze(1)
                target_logits = logits.sub_(top).gather(1, chunk_targets)
                exponentials = torch.exp(logits, out=spare[: len(logits)] if with_statistics else logits)
                total = exponentials.sum(dim=-1, keepdim=True)
                log_total = total.log()
                logps[rows] = (target_logits - log_total).squeeze(1)
                log_totals[rows] = (top + log_total).squeeze(1)
                if with_statistics:
                    # log sum p^2 = 2 log ||exp|| - 2 log total. A norm needs no second (n, V) tensor.
                    norm = torch.linalg.vector_norm(exponentials, dim=-1)
                    log_sum_sq_probs[rows] = 2 * (norm.log() - log_total.squeeze(1))
                    # -inf, as of a masked token, times its probability of 0 would be NaN.
                    logits.clamp_(min=torch.finfo(logits.dtype).min)
                    entropy[rows] = (log_total - logits.mul_(exponentials).sum(dim=-1, keepdim=True) / total).squeeze(1)
                if ctx.keeps_gradient:
                    # The buffer becomes the gradient of the log-probabilities: one-hot minus softmax.
                    exponentials.div_(-total).scatter_add_(1, chunk_targets, torch.ones_like(top))
                    gradients.add(chunk._replace(logits=exponentials), matrix)
        if ctx.keeps_gradient:
            ctx.save_for_backward(gradients.finish()[0])
        elif any(needed):
            ctx.save_for_backward(hidden, weight, bias, targets, log_totals)
        # Otherwise the statistics would require gradients, which backward does not compute.
        ctx.mark_non_differentiable(is_top, log_sum_sq_probs, entropy)
        return (logps, is_top, log_sum_sq_probs, entropy) if with_statistics else (logps, is_top, None, None)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token log-probabilities cannot be differentiated twice: do not set create_graph")
        if ctx.keeps_gradient:
            (gradient,) = ctx.saved_tensors
            # Out of place: backward may run more than once.
            return (gradient * upstream[:, None]).to(gradient.dtype), *(None,) * 6
        # Forward saved only the log-normaliser of each token, (N,); the logits are recomputed chunk by chunk.
        hidden, weight, bias, targets, log_totals = ctx.saved_tensors
        projection = ctx.projection
        gradients = ProjectionGradients(projection, hidden, weight, bias, ctx.needs_input_grad[:3])
        matrix = weight.to(projection.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                rows, slopes = chunk.rows, upstream[chunk.rows, None]
                # d logp / d logits = one-hot - softmax, times the upstream gradient.
                chunk.logits.sub_(log_totals[rows, None]).exp_().mul_(-slopes)
                chunk.logits.scatter_add_(1, targets[rows, None], slopes)
                gradients.add(chunk, matrix)
        return *gradients.finish(), *(None,) * 4

"""Next-token cross-entropy and token log-probabilities over a large vocabulary, chunked."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from recipes_lib.losses.projection import (
    LogitTransform,
    Projection,
    ProjectionGradients,
    VocabularyShard,
    build_projection,
)


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


def index_targets(targets: Tensor) -> Tensor:
    """Return where among the flattened targets, ``int64 (...)``, those stand that are scored; ``int64 (N,)``."""
    return targets.flatten().ge(0).nonzero().squeeze(1)


# How many targets a batch has differs from batch to batch: compiled, every number of them would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    positions: Tensor | None = None,
    share: VocabularyShard | None = None,
    **transform: Unpack[LogitTransform],
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
        positions: Where among the flattened ``targets`` those stand that are scored, ``int64 (N,)``; ``None`` has the
            host wait until the device has found them.
        share: Which rows of the embedding ``weight`` and ``bias`` are, where processes share them: all of these have
            the same ``hidden`` and ``targets``, and get the same sums and the whole gradient of ``hidden``.
        **transform: From hidden states to logits.

    Source: ``torch.nn.functional.cross_entropy``; ``tests/losses/test_next_token.py``.
    """
    if positions is None:
        positions = index_targets(targets)
    chosen, chosen_targets = hidden.flatten(0, -2), targets.flatten()
    if len(positions) < len(chosen_targets):
        # The backward pass adds rows; that of an index in brackets would sort them first.
        chosen, chosen_targets = (part.index_select(0, positions) for part in (chosen, chosen_targets))
    projection = build_projection(hidden, weight, **transform)
    nll_sum, num_correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        chosen, weight, transform.get("bias"), chosen_targets, projection, share, torch.is_grad_enabled()
    )
    return TokenSums(nll_sum, torch.full_like(num_correct, len(positions)), num_correct)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: Projection,
        share: VocabularyShard | None,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        # The caller says whether gradients are on: in here they never are, and ``needs_input_grad`` disregards it.
        needed = [is_grad_enabled and is_needed for is_needed in ctx.needs_input_grad[:3]]
        gradients = ProjectionGradients(projection, hidden, weight, bias, needed)
        nll_sum = hidden.new_zeros((), dtype=projection.wide)
        num_correct = targets.new_zeros(())
        matrix = weight.to(projection.dtype)
        # Off, because the dtype of the products is settled (``build_projection``): nothing in here is to be cast.
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                # (n, vocabulary) and (n, 1)
                logits, chunk_targets = chunk.logits, targets[chunk.rows, None]
                # The largest logit is subtracted, so that no exponential overflows and one of them is 1: their sum has
                # a finite logarithm. It is also the prediction, for the accuracy.
                top, best = logits.max(dim=-1, keepdim=True)
                if share is not None:
                    top, best = share.find_top(top, best)
                num_correct += (best == chunk_targets).sum()
                places, is_here = (chunk_targets, None) if share is None else _find_places(chunk_targets, logits, share)
                # Before the next line, which overwrites the logits: there is no room for a second chunk of them.
                at_target = logits.gather(1, places)
                total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
                if share is not None and is_here is not None:
                    # One process has the target, the others add 0; of the sum of exponentials each has a part.
                    at_target, total = share.add(at_target * is_here, total)
                # -log softmax = log(sum exp(logits - top)) + top - target.
                nll_sum += (top - at_target).sum()
                nll_sum += total.log().sum()
                if any(needed):
                    # The logits become their own gradient: softmax minus one-hot.
                    minus = logits.new_full((), -1.0).expand_as(places) if is_here is None else -is_here
                    logits.div_(total).scatter_add_(1, places, minus)
                    gradients.add(chunk, matrix)
        of_hidden, *of_weights = gradients.finish()
        # Each process has multiplied by its rows of the embedding; those of the weight are its own.
        if share is not None and of_hidden is not None:
            (of_hidden,) = share.add(of_hidden)
        ctx.save_for_backward(of_hidden, *of_weights)
        ctx.mark_non_differentiable(num_correct)
        return nll_sum, num_correct

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place, for a second V x D tensor would come just when activations peak. Should backward run again,
        # autograd finds the saved tensors changed and raises.
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def _find_places(targets: Tensor, logits: Tensor, share: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Where the logits of ``targets``, ``(n, 1)``, stand, and 1; 0 and 0 where another process has them."""
    # Multiplied by 0, not masked out: a mask would have another shape on each rank and wait for the device.
    places = targets - share.first
    is_here = (places >= 0) & (places < logits.shape[1])
    return places * is_here, is_here.to(logits.dtype)


@torch.no_grad()
def sample_targets(
    hidden: Tensor, weight: Tensor, generator: torch.Generator, **transform: Unpack[LogitTransform]
) -> Tensor:
    """Sample a token from the prediction at each position; logits exist for a chunk of places at a time.

    Args:
        hidden: Last hidden states, ``(N, D)``.
        weight: Output embedding, ``(V, D)``.
        generator: Of the device of ``hidden``.
        **transform: From hidden states to logits.

    Returns:
        Token ids, ``int64 (N,)``.
    """
    projection = build_projection(hidden, weight, **transform)
    # Without positions there are no chunks, and nothing cannot be concatenated.
    drawn = [torch.zeros(0, dtype=torch.int64, device=hidden.device)]
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in projection.iterate(hidden, weight.to(projection.dtype), transform.get("bias")):
            drawn.append(torch.multinomial(chunk.logits.softmax(dim=-1), 1, generator=generator).squeeze(1))
    return torch.cat(drawn)


class TokenLogps(NamedTuple):
    """Log-probabilities of ``N`` target tokens.

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
    with_statistics: bool = False,
    **transform: Unpack[LogitTransform],
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
        with_statistics: Compute ``log_sum_sq_probs`` and ``entropy`` too, which takes another chunk of memory.
        **transform: From hidden states to logits.

    Raises:
        RuntimeError: A target is not in the vocabulary; in backward: it runs with ``create_graph``.

    Source: ``log_softmax`` and ``gather`` of torch; ``tests/losses/test_token_logps.py``.
    """
    projection = build_projection(hidden, weight, **transform)
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
        # A gradient of weight or bias is a sum over tokens, and each token has its own factor from upstream: only that
        # of the hidden states can be made before the factors are known.
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
                # Minus the maximum, so that no exponential overflows; in place, as the logits are the largest tensor.
                top, best = logits.max(dim=-1, keepdim=True)
                is_top[rows] = (best == chunk_targets).squeeze(1)
                target_logits = logits.sub_(top).gather(1, chunk_targets)
                exponentials = torch.exp(logits, out=spare[: len(logits)] if with_statistics else logits)
                total = exponentials.sum(dim=-1, keepdim=True)
                log_total = total.log()
                logps[rows] = (target_logits - log_total).squeeze(1)
                log_totals[rows] = (top + log_total).squeeze(1)
                if with_statistics:
                    # A norm, not a sum of squares: no second (n, V) tensor.
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
        # Unmarked, the statistics would require gradients, which backward does not compute.
        ctx.mark_non_differentiable(is_top, log_sum_sq_probs, entropy)
        return (logps, is_top, log_sum_sq_probs, entropy) if with_statistics else (logps, is_top, None, None)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token log-probabilities cannot be differentiated twice: leave create_graph off")
        if ctx.keeps_gradient:
            (gradient,) = ctx.saved_tensors
            # Out of place: backward may run more than once.
            return (gradient * upstream[:, None]).to(gradient.dtype), *(None,) * 6
        # Of each token its total alone was kept, N numbers; the logits of a chunk are made once more.
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

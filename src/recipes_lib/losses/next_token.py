"""Next-token cross-entropy over a large vocabulary, a few hundred tokens of logits at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.losses.projection import Projection, ProjectionGradients, VocabularyShare, build_projection


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
    share: VocabularyShare | None = None,
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
        share: Which rows of the embedding ``weight`` and ``bias`` are, where processes share them: all of these have
            the same ``hidden`` and ``targets``, and get the same sums and the whole gradient of ``hidden``.

    Source: ``torch.nn.functional.cross_entropy``; ``tests/losses/test_next_token.py``.
    """
    is_target = targets >= 0
    projection = build_projection(hidden, weight, logit_scale=logit_scale, softcap=softcap, chunk_size=chunk_size)
    nll_sum, num_correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden[is_target], weight, bias, targets[is_target], projection, share, torch.is_grad_enabled()
    )
    return TokenSums(nll_sum, is_target.sum(), num_correct)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: Projection,
        share: VocabularyShare | None,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = [is_grad_enabled and is_needed for is_needed in ctx.needs_input_grad[:3]]
        gradients = ProjectionGradients(projection, hidden, weight, bias, needed)
        nll_sum = hidden.new_zeros((), dtype=projection.wide)
        num_correct = targets.new_zeros(())
        matrix = weight.to(projection.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in projection.iterate(hidden, matrix, bias):
                logits, chunk_targets = chunk.logits, targets[chunk.rows, None]
                top, best = logits.max(dim=-1, keepdim=True)
                if share is not None:
                    top, best = share.find_top(top, best)
                num_correct += (best == chunk_targets).sum()
                places, is_here = _find_places(chunk_targets, logits, share)
                at_target = logits.gather(1, places) * is_here
                total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
                if share is not None:
                    at_target, total = share.add(at_target, total)
                nll_sum += (top - at_target).sum()
                nll_sum += total.log().sum()
                if any(needed):
                    # The logits become their own gradient: softmax minus one-hot.
                    logits.div_(total).scatter_add_(1, places, -is_here)
                    gradients.add(chunk, matrix)
        of_hidden, *of_weights = gradients.finish()
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


def _find_places(targets: Tensor, logits: Tensor, share: VocabularyShare | None) -> tuple[Tensor, Tensor]:
    """Where the logits of ``targets``, ``(n, 1)``, stand, and 1; 0 and 0 where another process has them."""
    if share is None:
        return targets, torch.ones_like(targets, dtype=logits.dtype)
    places = targets - share.first
    is_here = (places >= 0) & (places < logits.shape[1])
    return places * is_here, is_here.to(logits.dtype)

"""How far two models agree about the next token of the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Means over all positions of all texts.

    Attributes:
        mean_kl: Kullback-Leibler divergence from the first model to the second, in nats a token.
        same_choice: Share of the positions at which both would choose the same token.
        num_tokens: Positions.
    """

    mean_kl: float
    same_choice: float
    num_tokens: int


def compute_next_token_logps(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return for each text the log-probabilities of the token after each of its tokens, ``float32 (T, V)``, in nats.

    Args:
        model: A causal language model in evaluation mode.
        texts: Token ids.
    """
    with torch.no_grad():
        return [_compute_logps(model, text) for text in texts]


def compare(first: Sequence[Tensor], second: Sequence[Tensor]) -> Agreement:
    """Compare two models by what ``compute_next_token_logps`` gave for them on the same texts.

    Source: ``torch.nn.functional.kl_div``; ``tests/models/test_agreement.py``.
    """
    kls, choices = zip(*_compare_each(first, second), strict=True)
    num_tokens = sum(len(logps) for logps in first)
    return Agreement(float(sum(kls)) / num_tokens, int(sum(choices)) / num_tokens, num_tokens)


def _compute_logps(model: Any, text: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(text)], device=model.device), use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1).cpu()


def _compare_each(first: Sequence[Tensor], second: Sequence[Tensor]) -> Iterator[tuple[float, int]]:
    for ours, theirs in zip(first, second, strict=True):
        divergence = (ours.exp() * (ours - theirs)).sum(dim=-1)
        yield divergence.sum(dtype=torch.float64).item(), int((ours.argmax(-1) == theirs.argmax(-1)).sum())

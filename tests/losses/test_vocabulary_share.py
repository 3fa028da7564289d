"""Vocabulary-parallel losses, with threads as ranks, against one rank that has the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.threads import run_together
from torch import Tensor

from recipes_lib.losses.next_token import compute_cross_entropy
from recipes_lib.losses.projection import VocabularyShard

SIZES = (6, 5)
"""Shards of 11 tokens on two ranks, as torch chunks them."""


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5, "softcap": 2.0}, {"chunk_size": 3}])
def test_vocabulary_parallel_loss_and_gradients_equal_one_rank(options, monkeypatch) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 4), torch.randn(sum(SIZES), 4), torch.randn(sum(SIZES))
    targets = torch.tensor([[0, 5, 6, 10, -100], [3, -100, 9, 1, 7]])

    def compute(part: slice, share: VocabularyShard | None) -> tuple[Tensor, ...]:
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight[part], bias[part])]
        sums = compute_cross_entropy(*inputs[:2], targets, bias=inputs[2], shard=share, **options)
        (3 * sums.nll_sum).backward()
        return sums.nll_sum.detach(), sums.num_correct, *(tensor.grad for tensor in inputs)

    group: Any = None
    starts = (0, SIZES[0])
    tasks = [
        lambda start=start, size=size: compute(slice(start, start + size), VocabularyShard(group, start))
        for start, size in zip(starts, SIZES, strict=True)
    ]
    nll, correct, of_hidden, of_weight, of_bias = compute(slice(None), None)
    parts = run_together(tasks, monkeypatch)
    for part in parts:
        torch.testing.assert_close(part[0], nll)
        assert part[1] == correct
        torch.testing.assert_close(part[2], of_hidden)
    torch.testing.assert_close(torch.cat([part[3] for part in parts]), of_weight)
    torch.testing.assert_close(torch.cat([part[4] for part in parts]), of_bias)


def test_vocabulary_parallel_argmax_is_first_of_equal_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [0.0, 1.0, 2.0, 9.0]])
    group: Any = None

    def find(start: int) -> tuple[Tensor, Tensor]:
        top, best = logits[:, start : start + 2].max(dim=-1, keepdim=True)
        return VocabularyShard(group, start).find_top(top, best)

    for top, best in run_together([lambda: find(0), lambda: find(2)], monkeypatch):
        assert top.flatten().tolist() == [7.0, 9.0]
        assert best.flatten().tolist() == [1, 3]

"""How far the hidden states of a student, led through a projection, are from those of its teacher."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

FeatureLoss = Literal["mse", "cosine"]

_MIN_SQUARE: Final = 1e-12
"""Mean square below which a state counts as 0 and is not scaled up."""


def compute_feature_sum(student: Tensor, teacher: Tensor, projection: Tensor, kind: FeatureLoss) -> Tensor:
    """Sum over tokens of the difference of hidden states, without unit.

    ``mse`` is the mean square of ``W n(s) - n(t)``, where ``n`` divides a state by its root mean square: a few
    dimensions of large models are a hundred times the others, and a token's size says little. The projected state is
    not divided again, which would make it twice the cosine loss; so ``W`` learns how large a state is to be as well.
    ``cosine`` is ``1 - cos(W s, t)``, as half the square of the difference of the two directions: one minus a
    cosine has no digits left where they are nearly equal.

    Args:
        student: ``(N, D_s)``, in any dtype.
        teacher: ``(N, D_t)``; it gets no gradient.
        projection: ``W``, ``(D_t, D_s)``; the product with it is in autocast's dtype, all else in ``float32``.
        kind: Which difference.

    Source: Sun et al. 2019 (arXiv 1908.09355, eq. 7) for states of unit length, Jiao et al. 2020 (arXiv 1909.10351,
        eq. 8) for the projection; ``tests/losses/test_features.py``.
    """
    projected = functional.linear(_divide_by_rms(student), projection)
    aim = _divide_by_rms(teacher.detach())
    projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
    if kind == "mse":
        return (projected - aim).square().mean(dim=-1).sum()
    # Both of mean square 1: half the mean square of their difference is one minus their cosine.
    return (_divide_by_rms(projected) - aim).square().mean(dim=-1).sum() / 2


def _divide_by_rms(states: Tensor) -> Tensor:
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return wide / wide.square().mean(dim=-1, keepdim=True).clamp_min(_MIN_SQUARE).sqrt()

"""Hidden-state, attention and relational losses of distillation (similarities, RKD distances and angles)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

MAX_ANGLE_TOKENS: Final = 32
"""Tokens of a document, evenly spaced, whose angles are compared: of ``n`` tokens there are ``n^3``."""

Compare = Callable[[Tensor, Tensor], Tensor]

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
        projection: ``W``, ``(D_t, D_s)``; the product with it is in its dtype, or autocast's, all else in ``float32``.
        kind: Which difference.

    Source: Sun et al. 2019 (arXiv 1908.09355, eq. 7) for states of unit length, Jiao et al. 2020 (arXiv 1909.10351,
        eq. 8) for the projection; ``tests/losses/test_features.py``.
    """
    projected = _widen(functional.linear(_divide_by_rms(student).to(projection.dtype), projection))
    aim = _divide_by_rms(teacher.detach())
    if kind == "mse":
        return (projected - aim).square().mean(dim=-1).sum()
    # Both of mean square 1: half the mean square of their difference is one minus their cosine.
    return (_divide_by_rms(projected) - aim).square().mean(dim=-1).sum() / 2


def compute_attention_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over queries of ``KL(teacher || student)`` between distributions over the keys, in nats.

    A key that both leave out, such as one of another document, adds nothing; so does a query that sees one key only.

    Args:
        student: Probabilities, ``(N, L)``, rows that sum to 1.
        teacher: As ``student``; it gets no gradient.

    Source: Wang et al. 2020 (arXiv 2002.10957, eq. 7), of the mean of the heads, which student and teacher may have
        different numbers of; ``tests/losses/test_layers.py``.
    """
    student, teacher = _widen(student), _widen(teacher.detach())
    floor = torch.finfo(student.dtype).tiny
    divergences: Tensor = torch.special.xlogy(teacher, teacher) - teacher * student.clamp_min(floor).log()
    return divergences.sum()


def compute_similarity_sum(student: Tensor, teacher: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over tokens of the mean square difference of their cosines with the tokens of their document.

    Args:
        student: Hidden states, ``(N, D_s)``, document behind document.
        teacher: ``(N, D_t)``, of the same tokens; it gets no gradient.
        lengths: Tokens of each document; they sum to ``N``.

    Source: Tung and Mori 2019 (arXiv 1907.09682, eq. 4); ``tests/losses/test_layers.py``.
    """
    return _sum_over_documents(student, teacher, lengths, _compare_cosines)


def compute_distance_sum(student: Tensor, teacher: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over tokens of the mean Huber loss of their distances to the tokens of their document.

    Distances are in units of their mean in the document, so that neither the width nor the scale of states counts.

    Args:
        student: As for ``compute_similarity_sum``.
        teacher: As for ``compute_similarity_sum``.
        lengths: As for ``compute_similarity_sum``.

    Source: Park et al. 2019 (RKD-D, arXiv 1904.05068, eq. 5 to 7), means as in its code; a token is an example here and
        a document a batch. ``tests/losses/test_layers.py``.
    """
    return _sum_over_documents(student, teacher, lengths, _compare_distances)


def compute_angle_sum(student: Tensor, teacher: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over tokens of the mean Huber loss of the angles that the tokens of their document have between them.

    Of a document of more than ``MAX_ANGLE_TOKENS`` so many tokens are compared, evenly spaced, and stand for all.

    Args:
        student: As for ``compute_similarity_sum``.
        teacher: As for ``compute_similarity_sum``.
        lengths: As for ``compute_similarity_sum``.

    Source: Park et al. 2019 (RKD-A, arXiv 1904.05068, eq. 8 to 10), as ``compute_distance_sum``.
    """
    return _sum_over_documents(student, teacher, lengths, _compare_angles)


def _sum_over_documents(student: Tensor, teacher: Tensor, lengths: Sequence[int], compare: Compare) -> Tensor:
    """Add the means of the documents, each as often as the document has tokens."""
    student, teacher = _widen(student), _widen(teacher.detach())
    # What holds the graph together where there is no document.
    total = student.sum() * 0.0
    # Products of sixteen bits have no digits left for differences of what is nearly alike.
    with torch.autocast(student.device.type, enabled=False):
        for own, other in zip(torch.split(student, list(lengths)), torch.split(teacher, list(lengths)), strict=True):
            total = total + len(own) * compare(own, other)
    return total


def _compare_cosines(student: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.normalize(states, dim=-1) for states in (student, teacher))
    return (own @ own.T - other @ other.T).square().mean()


def _compare_distances(student: Tensor, teacher: Tensor) -> Tensor:
    return functional.smooth_l1_loss(_measure_distances(student), _measure_distances(teacher))


def _compare_angles(student: Tensor, teacher: Tensor) -> Tensor:
    length, device = len(student), student.device
    count = min(length, MAX_ANGLE_TOKENS)
    chosen = torch.arange(count, device=device) * length // count
    return functional.smooth_l1_loss(_measure_angles(student[chosen]), _measure_angles(teacher[chosen]))


def _measure_distances(states: Tensor) -> Tensor:
    """Distances ``(n, n)`` in units of the mean of those that are not 0."""
    # By differences: by products, near tokens would lose their digits. Where tokens are alike its gradient is 0.
    distances = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist")
    mean = distances.sum() / (distances > 0).sum().clamp_min(1)
    return distances / torch.where(mean > 0, mean, 1.0)


def _measure_angles(states: Tensor) -> Tensor:
    """Cosine of the angle at each token between each two others, ``(n, n, n)``; 0 where two of the three are one."""
    directions = states[None] - states[:, None]
    norms: Tensor = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    units = directions / norms.masked_fill(norms == 0, torch.inf)
    return units @ units.transpose(1, 2)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _divide_by_rms(states: Tensor) -> Tensor:
    wide = _widen(states)
    return wide / wide.square().mean(dim=-1, keepdim=True).clamp_min(_MIN_SQUARE).sqrt()

"""Divergences of student and teacher: forward and reverse KL, generalised Jensen-Shannon, top-k with a tail bucket."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recipes_lib.losses.projection import build_projection


class Divergence(NamedTuple):
    """Divergences of ``n`` pairs of distributions over ``B`` outcomes.

    Attributes:
        values: In nats, ``(n,)``.
        slopes: Derivative of each value with respect to the student's log-probabilities, ``(n, B)``.
    """

    values: Tensor
    slopes: Tensor


def compute_divergence(teacher_logps: Tensor, student_logps: Tensor, beta: float) -> Divergence:
    """Generalised Jensen-Shannon divergence between ``p = exp(teacher_logps)`` and ``q = exp(student_logps)``.

    With ``m = beta * p + (1 - beta) * q`` it is ``beta * KL(p || m) + (1 - beta) * KL(q || m)``, divided by
    ``beta * (1 - beta)``. So it goes to ``KL(p || q)``, which covers all that the teacher says, as ``beta`` goes to 0,
    and to ``KL(q || p)``, which settles on a part of it, as ``beta`` goes to 1; there it is these two. Upstream's is
    not divided: it goes to 0 and jumps at both ends.

    Args:
        teacher_logps: Log-probabilities in nats, ``(n, B)``; finite.
        student_logps: As ``teacher_logps``.
        beta: In ``[0, 1]``.

    Source: Agarwal et al. 2024 (arXiv 2306.13649, eq. 1) and ``trl.experimental.gkd``, but for the divisor;
        ``tests/losses/test_divergence.py``.
    """
    gap = student_logps - teacher_logps
    if beta == 0:
        negative = -teacher_logps.exp()
        return Divergence((negative * gap).sum(dim=-1), negative)
    student = student_logps.exp()
    if beta == 1:
        # The derivative of q itself, q, sums to a constant: only differences of slopes over q count.
        return Divergence((student * gap).sum(dim=-1), student.mul_(gap))
    mixture_logps = torch.logaddexp(teacher_logps + math.log(beta), student_logps + math.log1p(-beta))
    to_student = student_logps - mixture_logps
    values = (student * to_student).sum(dim=-1) / beta
    values += (teacher_logps.exp() * (teacher_logps - mixture_logps)).sum(dim=-1) / (1 - beta)
    return Divergence(values, student.mul_(to_student).div_(beta))


MIN_LOG_TAIL = -80.0
"""Log-probability below which a tail counts as this: its exponential is the smallest that ``float32`` holds well."""


class TopLogps(NamedTuple):
    """What a teacher says at ``N`` places, but for its unlikelier tokens; log-probabilities at a temperature, in nats.

    Attributes:
        ids: Of the ``k`` likeliest tokens, likeliest first; ``int64 (N, k)``.
        logps: Theirs, normalised over the whole vocabulary; ``float32 (N, k)``.
        log_tails: Of all other tokens together; ``float32 (N,)``, at least ``MIN_LOG_TAIL``.
        target_logps: Of the token that the text has there, at temperature 1; ``float32 (N,)``.
        num_tokens: How many tokens the teacher has, ``C``: the student's first.
    """

    ids: Tensor
    logps: Tensor
    log_tails: Tensor
    target_logps: Tensor
    num_tokens: int

    def take(self, rows: slice) -> TopLogps:
        """Return some of the places."""
        return TopLogps(
            self.ids[rows], self.logps[rows], self.log_tails[rows], self.target_logps[rows], self.num_tokens
        )


@torch.no_grad()
def compute_top_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    k: int,
    temperature: float,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> TopLogps:
    """Return the ``k`` likeliest tokens of a teacher at each place; logits exist for a chunk of places at a time.

    Args:
        hidden: Last hidden states, ``(N, D)``, each beside the token that it predicts.
        weight: Output embedding, ``(C, D)``.
        targets: Tokens of the text, ``int64 (N,)``.
        k: At most ``C``.
        temperature: Divides the logits.
        bias: ``(C,)``.
        logit_scale: Factor on the logits, before the cap.
        softcap: Bound of the logits.

    Source: ``tests/losses/test_top_k.py``.
    """
    projection = build_projection(hidden, weight, logit_scale=logit_scale, softcap=softcap, chunk_size=None)
    ids = targets.new_empty((len(targets), k))
    logps = hidden.new_empty((len(targets), k), dtype=projection.wide)
    log_tails, target_logps = (logps.new_empty(len(targets)) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in projection.iterate(hidden, weight.to(projection.dtype), bias):
            logits, rows = chunk.logits, chunk.rows
            target_logps[rows] = (logits.gather(1, targets[rows, None]) - logits.logsumexp(-1, keepdim=True)).squeeze(1)
            scaled = logits.div_(temperature).log_softmax(dim=-1)
            logps[rows], ids[rows] = scaled.topk(k, dim=-1)
            # Added up, for one minus the others would be what rounding leaves.
            log_tails[rows] = scaled.scatter_(1, ids[rows], -torch.inf).logsumexp(dim=-1).clamp(min=MIN_LOG_TAIL)
    return TopLogps(ids, logps, log_tails, target_logps, len(weight))


def learn_top(student_logits: Tensor, teacher: TopLogps, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence between student and teacher over ``k + 1`` outcomes: the teacher's likeliest tokens, and any other.

    It is at most the divergence over all tokens, grows with ``k``, and is the whole at ``k = C``. Neither side is
    normalised over the ``k`` tokens, which would teach the student that there are no others.

    Args:
        student_logits: At the temperature, ``(n, C)``; overwritten by their gradient.
        teacher: At the same places.
        beta: As ``compute_divergence`` takes it.

    Returns:
        The divergence of each place, and its derivative with respect to ``student_logits``, ``(n, C)``.

    Source: ``tests/losses/test_top_k.py``.
    """
    top = student_logits.amax(dim=-1, keepdim=True)
    masses = student_logits.sub_(top).exp_()
    picked = masses.gather(1, teacher.ids)
    rest = masses.scatter_(1, teacher.ids, 0.0).sum(dim=-1, keepdim=True)
    tiny = torch.finfo(masses.dtype).tiny
    rest, total = rest.clamp(min=tiny), rest + picked.sum(dim=-1, keepdim=True)
    student_logps = (torch.cat([picked.clamp(min=tiny), rest], dim=-1)).log_().sub_(total.log())
    teacher_logps = torch.cat([teacher.logps, teacher.log_tails[:, None]], dim=-1)
    values, slopes = compute_divergence(teacher_logps.to(student_logps.dtype), student_logps, beta)
    # Of a token's own bucket less what all lose to normalisation; in the tail in proportion to its share of it.
    slope_sum = slopes.sum(dim=-1, keepdim=True)
    gradient = masses.mul_(slopes[:, -1:] / rest - slope_sum / total)
    gradient.scatter_(1, teacher.ids, slopes[:, :-1] - picked / total * slope_sum)
    return values, gradient

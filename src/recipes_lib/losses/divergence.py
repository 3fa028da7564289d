"""How far a student's distribution is from its teacher's: forward and reverse KL, and what lies between them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


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

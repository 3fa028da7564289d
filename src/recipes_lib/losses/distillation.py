"""Distillation losses: chunked divergence from a teacher over the vocabulary; hidden states, attention, relations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.losses.projection import TEACHER_PART, Chunk, ChunkedSum, LogitTransform, Projection

MIN_LOG_TAIL = -80.0
"""Lower bound of the log-probability of the tail; ``exp`` of it is still a normal ``float32``."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Distillation objective: ``alpha * CE + (1 - alpha) * temperature^2 * D_beta``.

    Attributes:
        alpha: Weight of the cross-entropy with the labels, in ``[0, 1]``.
        beta: Interpolation of the divergence (``compute_divergence``), in ``[0, 1]``: 0 forward KL, 1 reverse KL.
        temperature: Divisor of the logits of both models in the divergence; its square keeps the scale of gradients.
    """

    alpha: float = 0.5
    beta: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """Last hidden states of a teacher and its output projection, from which its logits are computed chunk by chunk.

    Attributes:
        hidden: Hidden states at the positions of the student's, ``(N, D)``.
        weight: Output embedding of the first ``C`` tokens of the student, in their order, ``(C, D)``.
        transform: From hidden states to logits; chunks are those of the student.
    """

    hidden: Tensor
    weight: Tensor
    transform: LogitTransform = field(default_factory=LogitTransform)


@dataclass(frozen=True, slots=True)
class DistillationTargets:
    """Labels and teacher outputs at ``N`` target positions.

    Attributes:
        targets: Token ids of the labels, ``int64 (N,)``, below ``C``.
        teacher: Outputs of the teacher, which get no gradient.
        objective: Loss and its weights.
    """

    targets: Tensor
    teacher: TeacherHead | TopLogps
    objective: Objective


class DistillationSums(NamedTuple):
    """Sums over target tokens, scalars; callers add them over micro-batches and processes, then divide.

    Only ``loss_sum`` is differentiable. Sums are ``float32`` in nats, numbers ``int64``.

    Attributes:
        loss_sum: Objective.
        nll_sum: Negative log-likelihood of the targets under the student.
        divergence_sum: Divergence from the teacher at the temperature, without the factor ``temperature^2``.
        teacher_nll_sum: Negative log-likelihood of the targets under the teacher, at temperature 1.
        num_correct: Targets that are the arg-max of the student.
        num_agreed: Positions at which student and teacher have the same arg-max.
        num_targets: Scored tokens.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    divergence_sum: Tensor
    teacher_nll_sum: Tensor
    num_correct: Tensor
    num_agreed: Tensor
    num_targets: Tensor


# The number of targets differs between batches: under torch.compile, every new number would be recompiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_distillation(
    hidden: Tensor, weight: Tensor, supervision: DistillationTargets, **transform: Unpack[LogitTransform]
) -> DistillationSums:
    """Sum of the distillation objective over the targets, in nats, without logits of the whole batch.

    Logits of student and teacher exist for ``chunk_size`` targets at a time. Gradients of the student are computed in
    the forward pass; backward scales them in place and can therefore run only once. The cross-entropy is over the whole
    vocabulary of the student. The divergence is between distributions over the ``C`` tokens of the teacher, which are
    the first of the student; padding rows of the student's embedding are excluded. With ``TopLogps``, all tokens except
    the teacher's top k form a single outcome.

    Args:
        hidden: Last hidden states of the student, ``(N, D)``, aligned with the tokens that they predict.
        weight: Output embedding of the student, ``(V, D)``, ``V >= C``.
        supervision: Labels, teacher outputs and objective.
        **transform: From the student's hidden states to its logits.

    Source: Hinton et al. 2015 (arXiv 1503.02531); ``tests/losses/test_distillation.py``.
    """
    part = TEACHER_PART if isinstance(supervision.teacher, TeacherHead) else 1
    projection = Projection(hidden, weight, part=part, **transform)
    alpha, temperature = supervision.objective.alpha, supervision.objective.temperature
    # Before autocast is disabled, which determines the dtype of the teacher's products too.
    supervisions = _iterate_supervision(supervision, projection)

    def compute(chunks: Iterator[Chunk], learn: Callable[[Chunk], None] | None) -> tuple[Tensor, ...]:
        nll_sum, divergence_sum, teacher_nll_sum = (hidden.new_zeros((), dtype=projection.wide) for _ in range(3))
        num_correct, num_agreed = (supervision.targets.new_zeros(()) for _ in range(2))
        for chunk, compare in zip(chunks, supervisions, strict=True):
            logits, targets = chunk.logits, supervision.targets[chunk.rows, None]
            prediction = logits.argmax(dim=-1, keepdim=True)
            num_correct += (prediction == targets).sum()
            log_totals = logits.logsumexp(dim=-1, keepdim=True)
            nll_sum += (log_totals - logits.gather(1, targets)).sum()
            divergences, gradient, teacher_prediction, teacher_nll = compare(logits, targets)
            divergence_sum += divergences.sum()
            teacher_nll_sum += teacher_nll
            num_agreed += (prediction == teacher_prediction).sum()
            if learn is not None:
                # The buffer of the logits becomes the gradient of alpha * CE: alpha * (softmax - one-hot).
                logits.sub_(log_totals).exp_().scatter_add_(1, targets, -torch.ones_like(log_totals)).mul_(alpha)
                # The factor T^2 of the divergence times 1 / T, the derivative of logits / T. The divergence covers the
                # first C columns only.
                logits[:, : gradient.shape[1]].add_(gradient, alpha=(1 - alpha) * temperature)
                learn(chunk)
        loss_sum = alpha * nll_sum + (1 - alpha) * temperature**2 * divergence_sum
        num_targets = supervision.targets.new_full((), len(supervision.targets))
        return loss_sum, nll_sum, divergence_sum, teacher_nll_sum, num_correct, num_agreed, num_targets

    return DistillationSums(
        *ChunkedSum.apply(  # type: ignore[no-untyped-call]
            hidden, weight, transform.get("bias"), projection, torch.is_grad_enabled(), compute, None
        )
    )


_Compared = tuple[Tensor, Tensor, Tensor, Tensor]
"""At the ``n`` positions of a chunk: divergence from the teacher, ``(n,)``; its gradient with respect to the student's
logits divided by the temperature, ``(n, C)``; arg-max of the teacher, ``int64 (n, 1)``; and the negative log-likelihood
of the targets under the teacher, a scalar."""


def _iterate_supervision(
    supervision: DistillationTargets, projection: Projection
) -> Iterator[Callable[[Tensor, Tensor], _Compared]]:
    """Return an iterator of one function per chunk, from the student's logits and the targets to the divergence."""
    teacher, objective, size = supervision.teacher, supervision.objective, projection.chunk_size
    if isinstance(teacher, TopLogps):
        starts = range(0, len(supervision.targets), size)
        return (partial(_compute_top, teacher.take(slice(start, start + size)), objective) for start in starts)
    transform: LogitTransform = {**teacher.transform, "chunk_size": size}
    head = Projection(teacher.hidden, teacher.weight, **transform)
    chunks = head.iterate(teacher.hidden, teacher.weight.to(head.dtype), teacher.transform.get("bias"))
    return (partial(_compute_full, chunk.logits.to(projection.wide), objective) for chunk in chunks)


def _compute_full(teacher_logits: Tensor, objective: Objective, logits: Tensor, targets: Tensor) -> _Compared:
    prediction = teacher_logits.argmax(dim=-1, keepdim=True)
    nll_sum = (teacher_logits.logsumexp(dim=-1, keepdim=True) - teacher_logits.gather(1, targets)).sum()
    teacher_logps = teacher_logits.div_(objective.temperature).log_softmax(dim=-1)
    student_logps = (logits[:, : teacher_logps.shape[1]] / objective.temperature).log_softmax(dim=-1)
    divergences, slopes = compute_divergence(teacher_logps, student_logps, objective.beta)
    # Backward of log-softmax: d / d logit_i = slope_i - softmax_i * sum_j slope_j.
    gradient = slopes.sub_(student_logps.exp_().mul_(slopes.sum(dim=-1, keepdim=True)))
    return divergences, gradient, prediction, nll_sum


def _compute_top(teacher: TopLogps, objective: Objective, logits: Tensor, targets: Tensor) -> _Compared:
    scaled = logits[:, : teacher.num_tokens] / objective.temperature
    divergences, gradient = compute_top_divergence(scaled, teacher, objective.beta)
    return divergences, gradient, teacher.ids[:, :1], -teacher.target_logps.sum()


def compute_divergence(teacher_logps: Tensor, student_logps: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon divergence between ``p = exp(teacher_logps)`` and ``q = exp(student_logps)``.

    With ``m = beta * p + (1 - beta) * q`` it is ``beta * KL(p || m) + (1 - beta) * KL(q || m)``, divided by
    ``beta * (1 - beta)``. With this divisor, which TRL lacks, it is continuous in ``beta``, with the limits
    ``KL(p || q)`` (mode-covering) at 0 and ``KL(q || p)`` (mode-seeking) at 1. Without it, it would go to 0 at both
    ends and jump there.

    Args:
        teacher_logps: Log-probabilities of the teacher in nats, ``(n, B)``; finite.
        student_logps: Log-probabilities of the student in nats, ``(n, B)``; finite.
        beta: Interpolation between forward and reverse KL, in ``[0, 1]``.

    Returns:
        Divergence of each pair in nats, ``(n,)``, and its derivative with respect to the student's log-probabilities,
        ``(n, B)``.

    Source: Agarwal et al. 2024 (arXiv 2306.13649, eq. 1) and ``trl.experimental.gkd``, except for the divisor;
        ``tests/losses/test_divergence.py``.
    """
    # In log-space, because probabilities may underflow to 0.
    gap = student_logps - teacher_logps
    if beta == 0:
        # Forward KL: sum p (log p - log q); its derivative with respect to log q is -p.
        negative = -teacher_logps.exp()
        return (negative * gap).sum(dim=-1), negative
    student = student_logps.exp()
    if beta == 1:
        # Reverse KL: sum q (log q - log p). The term q * 1 of its derivative is omitted: log-softmax maps it to 0.
        return (student * gap).sum(dim=-1), student.mul_(gap)
    # log(q / m) and log(p / m), which vanish with beta and 1 - beta, from log(q / p): differences to log m would be
    # rounding error, divided by beta.
    odds = math.log(beta) - math.log1p(-beta)
    to_student = functional.softplus(odds - gap).add_(math.log1p(-beta)).neg_()
    to_teacher = functional.softplus(gap - odds).add_(math.log(beta)).neg_()
    values = (student * to_student).sum(dim=-1) / beta + (teacher_logps.exp() * to_teacher).sum(dim=-1) / (1 - beta)
    # q log(q / m) / beta: the other terms of the derivative cancel, since beta p + (1 - beta) q = m.
    return values, student.mul_(to_student).div_(beta)


class TopLogps(NamedTuple):
    """Top-k log-probabilities of a teacher at ``N`` positions, at a temperature, in nats.

    Attributes:
        ids: Token ids of the ``k`` most likely tokens in descending order, ``int64 (N, k)``.
        logps: Log-probabilities of these tokens, normalised over the whole vocabulary, ``float32 (N, k)``.
        log_tails: Log-probability of all other tokens together, ``float32 (N,)``; at least ``MIN_LOG_TAIL``.
        target_logps: Log-probability of the target at temperature 1, ``float32 (N,)``.
        num_tokens: Vocabulary size ``C`` of the teacher, whose tokens are the first ones of the student.
    """

    ids: Tensor
    logps: Tensor
    log_tails: Tensor
    target_logps: Tensor
    num_tokens: int

    def take(self, rows: slice) -> TopLogps:
        """Return the values at some positions."""
        ids, logps, log_tails, target_logps = (part[rows] for part in self[:4])
        return TopLogps(ids, logps, log_tails, target_logps, self.num_tokens)


@torch.no_grad()
def compute_top_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, k: int, temperature: float, **transform: Unpack[LogitTransform]
) -> TopLogps:
    """Return the top-k log-probabilities of a teacher at each position, computed chunk by chunk.

    Args:
        hidden: Last hidden states, ``(N, D)``, aligned with the tokens that they predict.
        weight: Output embedding, ``(C, D)``.
        targets: Token ids of the labels, ``int64 (N,)``.
        k: Number of tokens per position, at most ``C``.
        temperature: Divisor of the logits.
        **transform: From hidden states to logits.

    Source: ``tests/losses/test_top_k.py``.
    """
    projection = Projection(hidden, weight, **transform)
    ids = targets.new_empty((len(targets), k))
    logps = hidden.new_empty((len(targets), k), dtype=projection.wide)
    log_tails, target_logps = (logps.new_empty(len(targets)) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in projection.iterate(hidden, weight.to(projection.dtype), transform.get("bias")):
            logits, rows = chunk.logits, chunk.rows
            target_logps[rows] = (logits.gather(1, targets[rows, None]) - logits.logsumexp(-1, keepdim=True)).squeeze(1)
            scaled = logits.div_(temperature).log_softmax(dim=-1)
            logps[rows], ids[rows] = scaled.topk(k, dim=-1)
            # Summed over the other tokens: one minus the top k would cancel to rounding error.
            log_tails[rows] = scaled.scatter_(1, ids[rows], -torch.inf).logsumexp(dim=-1).clamp(min=MIN_LOG_TAIL)
    return TopLogps(ids, logps, log_tails, target_logps, len(weight))


def compute_top_divergence(student_logits: Tensor, teacher: TopLogps, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence between student and teacher over ``k + 1`` outcomes: the teacher's top k tokens, and all others.

    It is a lower bound of the divergence over all tokens, increases with ``k``, and equals it at ``k = C``. Neither
    distribution is renormalised over the ``k`` tokens, which would train the student to give the others probability 0.

    Args:
        student_logits: Logits divided by the temperature, ``(n, C)``; overwritten by their gradient.
        teacher: Log-probabilities of the teacher at the same positions.
        beta: Interpolation of the divergence (``compute_divergence``).

    Returns:
        Divergence at each position, ``(n,)``, and its gradient with respect to ``student_logits``, ``(n, C)``.

    Source: ``tests/losses/test_top_k.py``.
    """
    # Unnormalised softmax: exponentials (n, C), those of the top k tokens (n, k), and the sum of all others (n, 1).
    top = student_logits.amax(dim=-1, keepdim=True)
    log_picked = student_logits.sub_(top).gather(1, teacher.ids)
    masses, picked = student_logits.exp_(), log_picked.exp()
    rest = masses.scatter_(1, teacher.ids, 0.0).sum(dim=-1, keepdim=True)
    # The tail may underflow to 0 in float32; its logarithm is then that of the smallest normal number.
    rest, total = rest.clamp(min=torch.finfo(rest.dtype).tiny), rest + picked.sum(dim=-1, keepdim=True)
    student_logps = torch.cat([log_picked, rest.log()], dim=-1).sub_(total.log())
    teacher_logps = torch.cat([teacher.logps, teacher.log_tails[:, None]], dim=-1)
    values, slopes = compute_divergence(teacher_logps.to(student_logps.dtype), student_logps, beta)
    # Backward of log-softmax over the k + 1 outcomes; the slope of the tail is divided among its tokens in proportion
    # to their probability.
    slope_sum = slopes.sum(dim=-1, keepdim=True)
    gradient = masses.mul_(slopes[:, -1:] / rest - slope_sum / total)
    gradient.scatter_(1, teacher.ids, slopes[:, :-1] - picked / total * slope_sum)
    return values, gradient


MAX_ANGLE_TOKENS: Final = 32
"""Evenly spaced tokens of a document whose angles are compared; ``n`` tokens have ``n^3`` angles."""

FeatureLoss = Literal["mse", "cosine"]
_MIN_SQUARE: Final = 1e-12
"""Lower bound of the mean square in the normalisation of hidden states, so that a state of 0 stays 0."""


def compute_feature_sum(student: Tensor, teacher: Tensor, projection: Tensor, kind: FeatureLoss) -> Tensor:
    """Sum over tokens of the difference between hidden states, dimensionless.

    ``mse`` is the mean square of ``W n(s) - n(t)``, where ``n`` divides a state by its root mean square: the norms of
    hidden states differ by orders of magnitude between tokens and carry little information. The projected state is not
    normalised again, which would make ``mse`` twice the cosine loss, so ``W`` also learns the scale. ``cosine`` is
    ``1 - cos(W s, t)``, computed as half the squared difference of unit vectors, which does not cancel for nearly
    parallel ones.

    Args:
        student: Hidden states of the student in any dtype, ``(N, D_s)``.
        teacher: Hidden states of the teacher, ``(N, D_t)``; they get no gradient.
        projection: Matrix ``W``, ``(D_t, D_s)``; the product with it is in its dtype or autocast's, all else in
            ``float32``.
        kind: Difference, ``mse`` or ``cosine``.

    Source: Sun et al. 2019 (arXiv 1908.09355, eq. 7) for states of unit length, Jiao et al. 2020 (arXiv 1909.10351,
        eq. 8) for the projection; ``tests/losses/test_features.py``.
    """
    projected = _widen(functional.linear(_divide_by_rms(student).to(projection.dtype), projection))
    target = _divide_by_rms(teacher.detach())
    if kind == "mse":
        return (projected - target).square().mean(dim=-1).sum()
    # For vectors a, b of mean square 1: mean((a - b)^2) / 2 = 1 - cos(a, b).
    return (_divide_by_rms(projected) - target).square().mean(dim=-1).sum() / 2


def compute_attention_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over queries of ``KL(teacher || student)`` between distributions over the keys, in nats.

    Keys that both models mask, such as those of another document, contribute 0, as do queries with a single key.

    Args:
        student: Attention probabilities of the student, ``(N, L)``; rows sum to 1.
        teacher: Attention probabilities of the teacher, ``(N, L)``; they get no gradient.

    Source: Wang et al. 2020 (arXiv 2002.10957, eq. 7), for the mean over heads, since student and teacher may have
        different numbers of heads; ``tests/losses/test_layers.py``.
    """
    student, teacher = _widen(student), _widen(teacher.detach())
    # 0 log 0 = 0 for the teacher (``xlogy``). Where only the student has probability 0, the KL would be infinite.
    floor = torch.finfo(student.dtype).tiny
    divergences: Tensor = torch.special.xlogy(teacher, teacher) - teacher * student.clamp_min(floor).log()
    return divergences.sum()


def compute_relation_sum(student: Tensor, teacher: Tensor, lengths: Sequence[int], kind: str) -> Tensor:
    """Relational distillation loss: the mean over pairs or triples of tokens of a document, summed over its tokens.

    ``similarity`` is the mean squared difference of cosines of pairs. ``distance`` is the mean Huber loss of distances
    of pairs, in units of their mean in the document, which makes it independent of the width and scale of the states.
    ``angle`` is the mean Huber loss of the cosines of angles of triples, over ``MAX_ANGLE_TOKENS`` evenly spaced tokens
    of longer documents.

    Args:
        student: Hidden states of the student, ``(N, D_s)``, documents concatenated.
        teacher: Hidden states of the teacher at the same tokens, ``(N, D_t)``; they get no gradient.
        lengths: Tokens of each document; their sum is ``N``.
        kind: Key of ``RELATIONS``.

    Source: Tung and Mori 2019 (arXiv 1907.09682, eq. 4) for ``similarity``, but there the rows of inner products have
        unit length, here the states; Park et al. 2019 (arXiv 1904.05068), RKD-D (eq. 5 to 7) and RKD-A (eq. 8 to 10),
        with means as in its code; tokens replace examples, documents batches. ``tests/losses/test_layers.py``.
    """
    student, teacher = _widen(student), _widen(teacher.detach())
    # Connected to the graph even without documents, so that backward reaches the same parameters on every rank.
    total = student.sum() * 0.0
    # In float32: half precision cannot resolve the differences of nearly equal states.
    with torch.autocast(student.device.type, enabled=False):
        for own, target in zip(torch.split(student, list(lengths)), torch.split(teacher, list(lengths)), strict=True):
            total = total + len(own) * RELATIONS[kind](own, target)
    return total


def _compare_cosines(student: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.normalize(states, dim=-1) for states in (student, teacher))
    return (own @ own.T - other @ other.T).square().mean()


def _compare_distances(student: Tensor, teacher: Tensor) -> Tensor:
    return functional.smooth_l1_loss(_measure_distances(student), _measure_distances(teacher))


def _compare_angles(student: Tensor, teacher: Tensor) -> Tensor:
    length, device = len(student), student.device
    count = min(length, MAX_ANGLE_TOKENS)
    # Evenly spaced indices without duplicates.
    chosen = torch.arange(count, device=device) * length // count
    return functional.smooth_l1_loss(_measure_angles(student[chosen]), _measure_angles(teacher[chosen]))


def _measure_distances(states: Tensor) -> Tensor:
    """Return the pairwise distances, ``(n, n)``, in units of the mean of those above 0."""
    # By differences: with matrix products, distances of close tokens would cancel. The gradient at distance 0 is 0.
    distances = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist")
    mean = distances.sum() / (distances > 0).sum().clamp_min(1)
    return distances / torch.where(mean > 0, mean, 1.0)


def _measure_angles(states: Tensor) -> Tensor:
    """Return the cosine of the angle at each token between any two others, ``(n, n, n)``; 0 where two are equal."""
    # (n, n, D): vector from token i to token j.
    directions = states[None] - states[:, None]
    norms: Tensor = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    units = directions / norms.masked_fill(norms == 0, torch.inf)
    return units @ units.transpose(1, 2)


RELATIONS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "similarity": _compare_cosines,
    "distance": _compare_distances,
    "angle": _compare_angles,
}
"""Kind of ``compute_relation_sum`` -> mean difference of a document, from its states in student and teacher."""


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _divide_by_rms(states: Tensor) -> Tensor:
    wide = _widen(states)
    return wide / wide.square().mean(dim=-1, keepdim=True).clamp_min(_MIN_SQUARE).sqrt()

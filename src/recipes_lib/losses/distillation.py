"""Losses of distillation: divergence to a teacher over the vocabulary, chunked; hidden states, attention, relations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.losses.projection import (
    TEACHER_PART,
    LogitTransform,
    Projection,
    ProjectionGradients,
    build_projection,
)

MIN_LOG_TAIL = -80.0
"""Log-probability below which a tail counts as this: its exponential is the smallest that ``float32`` holds well."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Distillation objective: ``alpha * CE + (1 - alpha) * temperature^2 * D_beta``.

    Attributes:
        alpha: Share of the cross-entropy with the labels, in ``[0, 1]``.
        beta: Which divergence, as ``compute_divergence`` takes it: 0 forward KL, 1 reverse KL.
        temperature: Divides the logits of both models before the divergence; the square keeps its gradient as large.
    """

    alpha: float = 0.5
    beta: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """A teacher's last hidden states with its output projection: its logits before they exist.

    Attributes:
        hidden: ``(N, D)``, each at the place of the student's.
        weight: Output embedding, ``(C, D)``: of the first ``C`` tokens of the student, in their order.
        bias: ``(C,)``.
        logit_scale: Factor on the logits, before the cap.
        softcap: Bound of the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class DistillationTargets:
    """Labels and teacher outputs at ``N`` target positions.

    Attributes:
        targets: The token that the text has there, ``int64 (N,)``, below ``C``.
        teacher: The teacher's outputs there; it gets no gradient.
        objective: The loss.
    """

    targets: Tensor
    teacher: TeacherHead | TopLogps
    objective: Objective


class DistillationSums(NamedTuple):
    """Sums over the target tokens; add them over batches and processes, then divide.

    Attributes:
        loss_sum: The objective in nats; ``float32`` scalar, differentiable.
        nll_sum: Negative log-likelihood of the targets under the student; without gradient, as all that follow.
        divergence_sum: Divergence to the teacher at the temperature, not multiplied by its square.
        teacher_nll_sum: Negative log-likelihood of the targets under the teacher, at temperature 1.
        num_correct: Targets that are the student's first choice; ``int64`` scalar.
        num_agreed: Places at which student and teacher have the same first choice.
        num_targets: Tokens that were scored.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    divergence_sum: Tensor
    teacher_nll_sum: Tensor
    num_correct: Tensor
    num_agreed: Tensor
    num_targets: Tensor


# How many targets a batch has differs from batch to batch: compiled, every number of them would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_distillation(
    hidden: Tensor,
    weight: Tensor,
    supervision: DistillationTargets,
    **transform: Unpack[LogitTransform],
) -> DistillationSums:
    """Sum of the objective over the targets, in nats, as ``compute_cross_entropy`` sums the cross-entropy.

    Logits of student and teacher exist for ``chunk_size`` targets at a time. Gradients are made in the forward pass,
    and only for the student; backward multiplies them, in place, and so can run once. The cross-entropy is over the
    student's whole vocabulary. The divergence is between distributions over the ``C`` tokens that the teacher has,
    which are the student's first: rows of padding behind them, which no text holds, take no part. Of a teacher known by
    ``TopLogps`` all tokens but its likeliest are one.

    Args:
        hidden: The student's last hidden states, ``(N, D)``, each beside the token that it predicts.
        weight: Its output embedding, ``(V, D)``, of at least ``C`` tokens.
        supervision: What is to be learnt.
        **transform: From the student's hidden states to its logits.

    Source: Hinton et al. 2015 (arXiv 1503.02531); ``tests/losses/test_distillation.py``.
    """
    part = TEACHER_PART if isinstance(supervision.teacher, TeacherHead) else 1
    projection = build_projection(hidden, weight, part=part, **transform)
    return DistillationSums(
        *_ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
            hidden, weight, transform.get("bias"), supervision, projection, torch.is_grad_enabled()
        )
    )


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        supervision: DistillationTargets,
        projection: Projection,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, ...]:
        # As in ``_ChunkedCrossEntropy``, which explains the steps that both have.
        needed = [is_grad_enabled and is_needed for is_needed in ctx.needs_input_grad[:3]]
        gradients = ProjectionGradients(projection, hidden, weight, bias, needed)
        alpha, temperature = supervision.objective.alpha, supervision.objective.temperature
        nll_sum, divergence_sum, teacher_nll_sum = (hidden.new_zeros((), dtype=projection.wide) for _ in range(3))
        num_correct, num_agreed = (supervision.targets.new_zeros(()) for _ in range(2))
        matrix = weight.to(projection.dtype)
        supervisions = _iterate_supervision(supervision, projection)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, learn in zip(projection.iterate(hidden, matrix, bias), supervisions, strict=True):
                logits, targets = chunk.logits, supervision.targets[chunk.rows, None]
                choice = logits.argmax(dim=-1, keepdim=True)
                num_correct += (choice == targets).sum()
                log_totals = logits.logsumexp(dim=-1, keepdim=True)
                nll_sum += (log_totals - logits.gather(1, targets)).sum()
                learnt = learn(logits, targets)
                divergence_sum += learnt.divergences.sum()
                teacher_nll_sum += learnt.nll_sum
                num_agreed += (choice == learnt.choice).sum()
                if any(needed):
                    # The logits become the gradient of the cross-entropy, softmax minus one-hot, and then of the whole.
                    logits.sub_(log_totals).exp_().scatter_add_(1, targets, -torch.ones_like(log_totals)).mul_(alpha)
                    # Of the T^2 before the divergence one T is left: logits are divided by it before the softmax. Where
                    # the teacher has fewer tokens, its part of the gradient ends with them.
                    shared = logits[:, : learnt.gradient.shape[1]]
                    shared.add_(learnt.gradient, alpha=(1 - alpha) * temperature)
                    gradients.add(chunk, matrix)
        ctx.save_for_backward(*gradients.finish())
        loss_sum = alpha * nll_sum + (1 - alpha) * temperature**2 * divergence_sum
        num_targets = supervision.targets.new_full((), len(supervision.targets))
        figures = nll_sum, divergence_sum, teacher_nll_sum, num_correct, num_agreed, num_targets
        ctx.mark_non_differentiable(*figures)
        return loss_sum, *figures

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as for the cross-entropy. Should backward run again, autograd finds them changed and raises.
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None)


class _ChunkDivergence(NamedTuple):
    """Divergence from the teacher of a chunk of positions, with its gradient.

    Attributes:
        divergences: ``(n,)``.
        gradient: Of each with respect to the student's logits at the temperature, ``(n, C)``.
        choice: The teacher's first choice, ``(n, 1)``.
        nll_sum: Of the targets under the teacher.
    """

    divergences: Tensor
    gradient: Tensor
    choice: Tensor
    nll_sum: Tensor


def _iterate_supervision(
    supervision: DistillationTargets, projection: Projection
) -> Iterator[Callable[[Tensor, Tensor], _ChunkDivergence]]:
    """Yield for each chunk the function that takes the student's logits and the targets; autocast is on or off here."""
    teacher, objective, size = supervision.teacher, supervision.objective, projection.chunk_size
    if isinstance(teacher, TopLogps):
        starts = range(0, len(supervision.targets), size)
        return (
            partial(_compute_top_divergence, teacher.take(slice(start, start + size)), objective) for start in starts
        )
    # Which dtype its products have is autocast's to say, and so is settled before that is off.
    transform = LogitTransform(logit_scale=teacher.logit_scale, softcap=teacher.softcap, chunk_size=size)
    taught = build_projection(teacher.hidden, teacher.weight, **transform)
    chunks = taught.iterate(teacher.hidden, teacher.weight.to(taught.dtype), teacher.bias)
    return (partial(_learn_whole, chunk.logits.to(projection.wide), objective) for chunk in chunks)


def _learn_whole(teacher_logits: Tensor, objective: Objective, logits: Tensor, targets: Tensor) -> _ChunkDivergence:
    choice = teacher_logits.argmax(dim=-1, keepdim=True)
    nll_sum = (teacher_logits.logsumexp(dim=-1, keepdim=True) - teacher_logits.gather(1, targets)).sum()
    teacher_logps = teacher_logits.div_(objective.temperature).log_softmax(dim=-1)
    student_logps = (logits[:, : teacher_logps.shape[1]] / objective.temperature).log_softmax(dim=-1)
    divergences, slopes = compute_divergence(teacher_logps, student_logps, objective.beta)
    # Through log-softmax: d/dlogit_i = slope_i - softmax_i * sum_j slope_j.
    gradient = slopes.sub_(student_logps.exp_().mul_(slopes.sum(dim=-1, keepdim=True)))
    return _ChunkDivergence(divergences, gradient, choice, nll_sum)


def _compute_top_divergence(
    teacher: TopLogps, objective: Objective, logits: Tensor, targets: Tensor
) -> _ChunkDivergence:
    scaled = logits[:, : teacher.num_tokens] / objective.temperature
    divergences, gradient = compute_top_divergence(scaled, teacher, objective.beta)
    return _ChunkDivergence(divergences, gradient, teacher.ids[:, :1], -teacher.target_logps.sum())


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
    # Everything is in log-space: a probability that is 0 in float32 still has a logarithm.
    gap = student_logps - teacher_logps
    if beta == 0:
        # Forward KL: sum p (log p - log q), whose derivative by log q is -p.
        negative = -teacher_logps.exp()
        return Divergence((negative * gap).sum(dim=-1), negative)
    student = student_logps.exp()
    if beta == 1:
        # The derivative of q itself, q, sums to a constant: only differences of slopes over q count.
        return Divergence((student * gap).sum(dim=-1), student.mul_(gap))
    # log(beta p + (1 - beta) q).
    mixture_logps = torch.logaddexp(teacher_logps + math.log(beta), student_logps + math.log1p(-beta))
    to_student = student_logps - mixture_logps
    values = (student * to_student).sum(dim=-1) / beta
    values += (teacher_logps.exp() * (teacher_logps - mixture_logps)).sum(dim=-1) / (1 - beta)
    # q log(q / m) / beta: the other terms of the derivative cancel, because beta p + (1 - beta) q is m.
    return Divergence(values, student.mul_(to_student).div_(beta))


class TopLogps(NamedTuple):
    """Top-k log-probabilities of a teacher at ``N`` positions, at a temperature, in nats.

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
    **transform: Unpack[LogitTransform],
) -> TopLogps:
    """Return the ``k`` likeliest tokens of a teacher at each place; logits exist for a chunk of places at a time.

    Args:
        hidden: Last hidden states, ``(N, D)``, each beside the token that it predicts.
        weight: Output embedding, ``(C, D)``.
        targets: Tokens of the text, ``int64 (N,)``.
        k: At most ``C``.
        temperature: Divides the logits.
        **transform: From hidden states to logits.

    Source: ``tests/losses/test_top_k.py``.
    """
    projection = build_projection(hidden, weight, **transform)
    ids = targets.new_empty((len(targets), k))
    logps = hidden.new_empty((len(targets), k), dtype=projection.wide)
    log_tails, target_logps = (logps.new_empty(len(targets)) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in projection.iterate(hidden, weight.to(projection.dtype), transform.get("bias")):
            logits, rows = chunk.logits, chunk.rows
            target_logps[rows] = (logits.gather(1, targets[rows, None]) - logits.logsumexp(-1, keepdim=True)).squeeze(1)
            scaled = logits.div_(temperature).log_softmax(dim=-1)
            logps[rows], ids[rows] = scaled.topk(k, dim=-1)
            # Added up, for one minus the others would be what rounding leaves.
            log_tails[rows] = scaled.scatter_(1, ids[rows], -torch.inf).logsumexp(dim=-1).clamp(min=MIN_LOG_TAIL)
    return TopLogps(ids, logps, log_tails, target_logps, len(weight))


def compute_top_divergence(student_logits: Tensor, teacher: TopLogps, beta: float) -> tuple[Tensor, Tensor]:
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
    # Softmax without its division: exponentials (n, C), those of the teacher's k tokens, and the sum of all others.
    top = student_logits.amax(dim=-1, keepdim=True)
    masses = student_logits.sub_(top).exp_()
    picked = masses.gather(1, teacher.ids)
    rest = masses.scatter_(1, teacher.ids, 0.0).sum(dim=-1, keepdim=True)
    # A bucket may be empty in float32; the logarithm of the smallest number stands for it.
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


MAX_ANGLE_TOKENS: Final = 32
"""Tokens of a document, evenly spaced, whose angles are compared: of ``n`` tokens there are ``n^3``."""

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
    # 0 log 0 = 0 for the teacher (``xlogy``). A key that only the student leaves out would cost infinitely much.
    floor = torch.finfo(student.dtype).tiny
    divergences: Tensor = torch.special.xlogy(teacher, teacher) - teacher * student.clamp_min(floor).log()
    return divergences.sum()


def compute_relation_sum(student: Tensor, teacher: Tensor, lengths: Sequence[int], kind: str) -> Tensor:
    """Sum over tokens of how differently their hidden states relate to those of their document, each document's mean.

    ``similarity`` is the mean square difference of cosines. ``distance`` is the mean Huber loss of distances, in units
    of their mean in the document, so that neither the width nor the scale of states counts. ``angle`` is the mean Huber
    loss of the angles between tokens; of a document of more than ``MAX_ANGLE_TOKENS`` so many tokens are compared,
    evenly spaced, and stand for all.

    Args:
        student: Hidden states, ``(N, D_s)``, document behind document.
        teacher: ``(N, D_t)``, of the same tokens; it gets no gradient.
        lengths: Tokens of each document; they sum to ``N``.
        kind: Key of ``RELATIONS``.

    Source: Tung and Mori 2019 (arXiv 1907.09682, eq. 4) for ``similarity``; Park et al. 2019 (arXiv 1904.05068), RKD-D
        (eq. 5 to 7) and RKD-A (eq. 8 to 10), means as in its code: a token is an example here and a document a batch.
        ``tests/losses/test_layers.py``.
    """
    student, teacher = _widen(student), _widen(teacher.detach())
    # What holds the graph together where there is no document.
    total = student.sum() * 0.0
    # Products of sixteen bits have no digits left for differences of what is nearly alike.
    with torch.autocast(student.device.type, enabled=False):
        for own, other in zip(torch.split(student, list(lengths)), torch.split(teacher, list(lengths)), strict=True):
            total = total + len(own) * RELATIONS[kind](own, other)
    return total


def _compare_cosines(student: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.normalize(states, dim=-1) for states in (student, teacher))
    return (own @ own.T - other @ other.T).square().mean()


def _compare_distances(student: Tensor, teacher: Tensor) -> Tensor:
    return functional.smooth_l1_loss(_measure_distances(student), _measure_distances(teacher))


def _compare_angles(student: Tensor, teacher: Tensor) -> Tensor:
    length, device = len(student), student.device
    count = min(length, MAX_ANGLE_TOKENS)
    # Evenly spaced in whole numbers, of which none comes twice.
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
    # (n, n, D): from token i to token j.
    directions = states[None] - states[:, None]
    norms: Tensor = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    units = directions / norms.masked_fill(norms == 0, torch.inf)
    return units @ units.transpose(1, 2)


RELATIONS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "similarity": _compare_cosines,
    "distance": _compare_distances,
    "angle": _compare_angles,
}
"""Kind of ``compute_relation_sum`` -> mean over the tokens of a document, of its states in student and teacher."""


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _divide_by_rms(states: Tensor) -> Tensor:
    wide = _widen(states)
    return wide / wide.square().mean(dim=-1, keepdim=True).clamp_min(_MIN_SQUARE).sqrt()

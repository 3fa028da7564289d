"""Distillation loss over a large vocabulary, chunked: cross-entropy and divergence to a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.losses.divergence import TopLogps, compute_divergence, learn_top
from recipes_lib.losses.projection import Projection, ProjectionGradients, build_projection


@dataclass(frozen=True, slots=True)
class Objective:
    """What a student learns: ``alpha * CE + (1 - alpha) * temperature^2 * D_beta``.

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
    """What is to be learnt at ``N`` places.

    Attributes:
        targets: The token that the text has there, ``int64 (N,)``, below ``C``.
        teacher: What the teacher says there; it gets no gradient.
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
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
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
        bias: ``(V,)``.
        logit_scale: Factor on the student's logits, before the cap.
        softcap: Bound of the student's logits.
        chunk_size: Default: as many tokens as have ``CHUNK_BYTES`` of the student's logits.

    Source: Hinton et al. 2015 (arXiv 1503.02531); ``tests/losses/test_distillation.py``.
    """
    projection = build_projection(hidden, weight, logit_scale=logit_scale, softcap=softcap, chunk_size=chunk_size)
    return DistillationSums(
        *_ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, supervision, projection, torch.is_grad_enabled()
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
                    shared = logits[:, : learnt.gradient.shape[1]]
                    shared.add_(learnt.gradient, alpha=(1 - alpha) * temperature)
                    gradients.add(chunk, matrix)
        ctx.save_for_backward(*gradients.finish())
        loss_sum = alpha * nll_sum + (1 - alpha) * temperature**2 * divergence_sum
        num_targets = supervision.targets.new_tensor(len(supervision.targets))
        figures = nll_sum, divergence_sum, teacher_nll_sum, num_correct, num_agreed, num_targets
        ctx.mark_non_differentiable(*figures)
        return loss_sum, *figures

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as for the cross-entropy. Should backward run again, autograd finds them changed and raises.
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None)


class _Learnt(NamedTuple):
    """What a chunk of places has to learn of the teacher.

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
) -> Iterator[Callable[[Tensor, Tensor], _Learnt]]:
    """Yield for each chunk the function that takes the student's logits and the targets; autocast is on or off here."""
    teacher, objective, size = supervision.teacher, supervision.objective, projection.chunk_size
    if isinstance(teacher, TopLogps):
        starts = range(0, len(supervision.targets), size)
        return (partial(_learn_top, teacher.take(slice(start, start + size)), objective) for start in starts)
    # Which dtype its products have is autocast's to say, and so is settled before that is off.
    taught = build_projection(
        teacher.hidden,
        teacher.weight,
        logit_scale=teacher.logit_scale,
        softcap=teacher.softcap,
        chunk_size=size,
    )
    chunks = taught.iterate(teacher.hidden, teacher.weight.to(taught.dtype), teacher.bias)
    return (partial(_learn_whole, chunk.logits.to(projection.wide), objective) for chunk in chunks)


def _learn_whole(teacher_logits: Tensor, objective: Objective, logits: Tensor, targets: Tensor) -> _Learnt:
    choice = teacher_logits.argmax(dim=-1, keepdim=True)
    nll_sum = (teacher_logits.logsumexp(dim=-1, keepdim=True) - teacher_logits.gather(1, targets)).sum()
    teacher_logps = teacher_logits.div_(objective.temperature).log_softmax(dim=-1)
    student_logps = (logits[:, : teacher_logps.shape[1]] / objective.temperature).log_softmax(dim=-1)
    divergences, slopes = compute_divergence(teacher_logps, student_logps, objective.beta)
    gradient = slopes.sub_(student_logps.exp_().mul_(slopes.sum(dim=-1, keepdim=True)))
    return _Learnt(divergences, gradient, choice, nll_sum)


def _learn_top(teacher: TopLogps, objective: Objective, logits: Tensor, targets: Tensor) -> _Learnt:
    scaled = logits[:, : teacher.num_tokens] / objective.temperature
    divergences, gradient = learn_top(scaled, teacher, objective.beta)
    return _Learnt(divergences, gradient, teacher.ids[:, :1], -teacher.target_logps.sum())

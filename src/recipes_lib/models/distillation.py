"""A student scored beside its teacher on a batch, each in its own output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipes_lib.losses.distillation import DistillationSums, Lesson, Objective, TeacherHead, compute_distillation
from recipes_lib.losses.top_k import TopLogps, compute_top_logps
from recipes_lib.models.heads import HeadOutput


def score_beside_teacher(
    student: Any, teacher: Any, inputs: Mapping[str, Any], labels: Tensor, objective: Objective
) -> HeadOutput:
    """Run both models on a batch and sum the objective over its targets.

    The student is run inside the call of the teacher's output projection, so that the weights of both are gathered
    there by whatever shards them, while the logits of a chunk are made; nothing of the teacher's is kept for backward.

    Args:
        student: A model with a loss head, as it is trained.
        teacher: A frozen one, with at most the student's vocabulary.
        inputs: ``input_ids`` and what else both models take.
        labels: ``int64 (B, L)``, unshifted, negative where there is no target.
        objective: The loss.

    Returns:
        ``result`` is a ``DistillationSums``.

    Source: ``tests/models/test_distillation.py``.
    """
    is_target = labels[:, 1:] >= 0
    outputs: list[HeadOutput] = []

    def lend(hidden: Tensor, weight: Tensor, **options: Any) -> None:
        head = TeacherHead(hidden[:, :-1][is_target], weight, **options)
        # Not returned through the teacher, whose hooks would wait for a backward pass of its own.
        outputs.append(score_beside_record(student, head, inputs, labels, objective))

    teacher(**inputs, head=lend)
    return outputs[0]


def score_beside_record(
    student: Any, teacher: TeacherHead | TopLogps, inputs: Mapping[str, Any], labels: Tensor, objective: Objective
) -> HeadOutput:
    """As ``score_beside_teacher``, where it is known what the teacher says of the targets, row by row."""
    is_target = labels[:, 1:] >= 0
    lesson = Lesson(labels[:, 1:][is_target], teacher, objective)

    def score(hidden: Tensor, weight: Tensor, **options: Any) -> DistillationSums:
        sums: DistillationSums = compute_distillation(hidden[:, :-1][is_target], weight, lesson, **options)
        return sums

    output: HeadOutput = student(**inputs, head=score)
    return output


@torch.no_grad()
def ask_teacher(teacher: Any, inputs: Mapping[str, Any], labels: Tensor, *, k: int, temperature: float) -> TopLogps:
    """Return what a teacher says of the targets of a batch, row by row: its ``k`` likeliest tokens.

    Args:
        teacher: As for ``score_beside_teacher``.
        inputs: As for ``score_beside_teacher``.
        labels: As for ``score_beside_teacher``.
        k: At most the teacher's vocabulary.
        temperature: Divides the logits.
    """
    is_target = labels[:, 1:] >= 0

    def read(hidden: Tensor, weight: Tensor, **options: Any) -> TopLogps:
        targets = labels[:, 1:][is_target]
        return compute_top_logps(hidden[:, :-1][is_target], weight, targets, k=k, temperature=temperature, **options)

    top: TopLogps = teacher(**inputs, head=read).result
    return top

"""A student scored beside its teacher on a batch, each in its own output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recipes_lib.losses.distillation import DistillationSums, Lesson, Objective, TeacherHead, compute_distillation
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
    targets = labels[:, 1:][is_target]
    outputs: list[HeadOutput] = []

    def lend(hidden: Tensor, weight: Tensor, **options: Any) -> None:
        head = TeacherHead(hidden[:, :-1][is_target], weight, **options)
        lesson = Lesson(targets, head, objective)

        def score(hidden: Tensor, weight: Tensor, **options: Any) -> DistillationSums:
            sums: DistillationSums = compute_distillation(hidden[:, :-1][is_target], weight, lesson, **options)
            return sums

        # Not returned through the teacher, whose hooks would wait for a backward pass of its own.
        outputs.append(student(**inputs, head=score))

    teacher(**inputs, head=lend)
    return outputs[0]

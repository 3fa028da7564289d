"""Distillation: the trainer of fine-tuning, whose student learns from texts and from what a teacher says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from recipes_lib.config.schema import DistillationConfig
from recipes_lib.errors import DivergedError
from recipes_lib.losses.distillation import DistillationSums, Objective
from recipes_lib.models.distillation import score_beside_teacher
from recipes_lib.training.arguments import get_rounding_dtype
from recipes_lib.training.figures import TermFigures
from recipes_lib.training.recipe_trainer import Batch
from recipes_lib.training.sft import SFTTrainer


class DistillationTrainer(SFTTrainer):
    """``SFTTrainer`` with the objective of ``compute_distillation``: a mean over the targets of the whole step.

    Source: ``tests/training/test_distill.py``, ``tests/distributed/test_distill.py``.
    """

    def __init__(
        self, *, teacher: PreTrainedModel, distillation: DistillationConfig, is_own_teacher: bool, **kwargs: Any
    ) -> None:
        """Set the trainer up.

        Args:
            teacher: From ``load_teacher``; it is in no optimizer and in no checkpoint.
            distillation: What the student learns.
            is_own_teacher: Whether the student begins as a copy of its teacher: the first divergence must be 0.
            **kwargs: As ``SFTTrainer``.
        """
        super().__init__(**kwargs)
        self.objective: Objective = build_objective(distillation)
        self.figures = TermFigures()
        # Before the one that writes, which puts down what the figures are by then.
        self.callback_handler.callbacks.insert(1, self.figures)
        # Its products in the student's precision, its weights sharded as the student's.
        self.teacher: nn.Module = self.accelerator.prepare_model(teacher, device_placement=True, evaluation_mode=True)
        # accelerate keeps what it prepares, for checkpoints of its own.
        self.accelerator._models.pop()
        self._teacher_dtype = teacher.dtype
        self._is_first_step = True
        self._is_own_teacher = is_own_teacher

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this process's share of the step's mean loss of a target."""
        num_tokens, labels = inputs.pop("num_tokens"), inputs.pop("labels")
        output = score_beside_teacher(model, self.teacher, inputs, labels, self.objective)
        sums: DistillationSums = output.result
        if self._is_first_step:
            self._is_first_step = False
            if self.state.global_step == 0:
                dtypes = (get_rounding_dtype(self.model, self.args), self._teacher_dtype)
                dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
                self.observer.progress.say(verify_first_sums(sums, dtype, is_own_teacher=self._is_own_teacher))
        num_targets = sums.num_targets if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, while num_targets counts all of them.
        loss = sums.loss_sum * (self.accelerator.num_processes / num_targets)
        if output.aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * output.aux_loss / self.current_gradient_accumulation_steps
        self.figures.add(_name_figures(sums), sums.num_targets)
        self.observer.counter.add(num_tokens, sums.num_targets, sums.num_correct)
        return (loss, output) if return_outputs else loss

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """While it lasts, what is computed does not count as training, nor as the first step."""
        figures, self.figures = self.figures, TermFigures()
        is_first, self._is_first_step = self._is_first_step, False
        try:
            with super().rehearsal():
                yield
        finally:
            self.figures, self._is_first_step = figures, is_first


def build_objective(distillation: DistillationConfig) -> Objective:
    """Return what the keys of a run say is to be learnt."""
    return Objective(
        alpha=distillation.distillation_alpha,
        beta=distillation.distillation_beta,
        temperature=distillation.distillation_temperature,
    )


def verify_first_sums(sums: DistillationSums, dtype: torch.dtype, *, is_own_teacher: bool) -> str:
    """Look at the first batch of a run, before any update.

    Args:
        sums: Of this process.
        dtype: What results are rounded to.
        is_own_teacher: Whether the divergence must be 0.

    Returns:
        What was found, in a line.

    Raises:
        DivergedError: A student that is its own teacher differs from it by more than rounding.
    """
    num_targets = max(1, int(sums.num_targets))
    divergence, nll, teacher_nll = (
        float(figure) / num_targets for figure in (sums.divergence_sum, sums.nll_sum, sums.teacher_nll_sum)
    )
    allowed = 4 * torch.finfo(dtype).eps
    if is_own_teacher and not abs(divergence) <= allowed:
        raise DivergedError(
            f"the student is its own teacher, and before the first update they are {divergence:.3g} nats apart: "
            f"rounding explains {allowed:.1g}. Dropout is on, or the two read different tokens"
        )
    told = f"step 0: labels cost the student {nll:.3f} nats and the teacher {teacher_nll:.3f}, {divergence:.3g} apart"
    if teacher_nll > nll:
        told += "; the teacher knows these texts less well than the student: is it the right one?"
    return told


def _name_figures(sums: DistillationSums) -> dict[str, torch.Tensor]:
    return {
        "distillation/nll": sums.nll_sum,
        "distillation/divergence": sums.divergence_sum,
        "distillation/teacher_nll": sums.teacher_nll_sum,
        "distillation/agreement": sums.num_agreed.float(),
    }

"""KL divergence of a trained model to its frozen start model, or to its own base without the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.losses.distillation import (
    DistillationSums,
    DistillationTargets,
    Objective,
    TeacherHead,
    compute_distillation,
)
from recipes_lib.models.adapters.lora import adapters_off
from recipes_lib.models.heads.loss_head import (
    HeadOutput,
    find_targets,
    pick_predictors,
    score_beside_teacher,
)
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.layouts.fsdp import prepare_frozen
from recipes_lib.training.trainers.trained_model import freeze


class BaseDivergence:
    """Cross-entropy and ``coefficient * KL(model || base)`` over the targets of a batch, in chunks of them.

    The computation is that of distillation, with the base in place of the teacher.

    Source: ``tests/training/forgetting/test_base_divergence.py``.
    """

    def __init__(self, coefficient: float, base: PreTrainedModel | None) -> None:
        """Wrap the base.

        Args:
            coefficient: Of the divergence, above 0.
            base: The frozen start, with a loss head; ``None``: the model itself without its adapter.
        """
        self._base: nn.Module | None = base
        # Distillation weighs both terms with weights that sum to 1.
        self._objective = Objective(alpha=1 / (1 + coefficient), beta=1.0)
        # (1 + c) * (CE / (1 + c) + c / (1 + c) * KL) = CE + c * KL.
        self._scale = 1 + coefficient

    def prepare(self, accelerator: Accelerator) -> None:
        """Shard the base like the model, with the same compute dtype."""
        if self._base is not None:
            self._base = prepare_frozen(accelerator, self._base)

    def score(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, positions: Tensor | None = None
    ) -> HeadOutput:
        """Run both models on a batch.

        Args:
            model: With a loss head, as it is trained.
            inputs: ``input_ids`` and what else it takes.
            labels: ``int64 (B, L)``, unshifted, negative where there is no target.
            positions: As for ``score_beside_teacher``.

        Returns:
            ``result`` is a ``DistillationSums``, the base as teacher; ``weigh`` makes the loss of it.
        """
        if self._base is not None:
            return score_beside_teacher(model, self._base, inputs, labels, self._objective, positions)
        chosen = find_targets(labels) if positions is None else positions
        with torch.no_grad(), adapters_off(extract_model_from_parallel(model)):
            states = model(**inputs, head=lambda hidden, *_, **__: pick_predictors(hidden, chosen)).result

        def score(hidden: Tensor, weight: Tensor, **options: Any) -> DistillationSums:
            # The output projection has no adapter, so it equals the base's.
            base = TeacherHead(states, weight.detach(), **options)
            supervision = DistillationTargets(labels[:, 1:].flatten()[chosen], base, self._objective)
            states_now = pick_predictors(hidden, chosen)
            sums: DistillationSums = compute_distillation(states_now, weight, supervision, **options)
            return sums

        output: HeadOutput = model(**inputs, head=score)
        return output

    def weigh(self, sums: DistillationSums) -> Tensor:
        """Return the sum over targets of cross-entropy and weighted divergence, in nats; differentiable."""
        return sums.loss_sum * self._scale


def load_base(config: RecipeConfig, attn_implementation: str) -> BaseDivergence | None:
    """Load the base of a run; ``None`` if ``kl_to_base`` is 0.

    Args:
        config: The run.
        attn_implementation: Of the model, whose batches the base reads.

    Raises:
        ConfigError: As ``load_causal_lm``.
    """
    coefficient = config.forgetting.kl_to_base
    if not coefficient:
        return None
    if config.adapter.use_peft:
        return BaseDivergence(coefficient, None)
    return BaseDivergence(coefficient, freeze(load_causal_lm(config.model, attn_implementation)))

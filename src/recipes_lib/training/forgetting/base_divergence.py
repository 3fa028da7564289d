"""KL divergence of a trained model from its frozen start model, or from its own base without the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.losses.distillation import DistillationSums, Objective
from recipes_lib.models.adapters.lora import adapters_off
from recipes_lib.models.heads.loss_head import HeadOutput, pick_predictors, score_beside_record, score_beside_teacher
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.layouts.fsdp import prepare_frozen
from recipes_lib.training.trainers.trained_model import freeze


class BaseDivergence:
    """Cross-entropy plus ``coefficient * KL(model || base)`` over the targets of a batch, in chunks of targets.

    Computed as distillation with the base as teacher.

    Source: ``tests/training/forgetting/test_base_divergence.py``.
    """

    def __init__(self, coefficient: float, base: PreTrainedModel | None) -> None:
        """Initialise the objective.

        Args:
            coefficient: Coefficient of the divergence, above 0.
            base: Frozen start model with a loss head; ``None``: the trained model without its adapter.
        """
        self.model: nn.Module | None = base
        # Distillation weights its two terms by alpha and 1 - alpha, so the sum is scaled by 1 + c:
        # (1 + c) * (CE / (1 + c) + c / (1 + c) * KL) = CE + c * KL.
        self._objective = Objective(alpha=1 / (1 + coefficient), beta=1.0)
        self._scale = 1 + coefficient

    def prepare(self, accelerator: Accelerator) -> None:
        """Shard the base like the trained model, with the same compute dtype."""
        if self.model is not None:
            self.model = prepare_frozen(accelerator, self.model)

    def score(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, positions: Tensor) -> HeadOutput:
        """Run both models on a batch.

        Args:
            model: Trained model with a loss head, wrapped or not.
            inputs: Keyword arguments of the model, such as ``input_ids``, ``int64 (B, T)``.
            labels: Unshifted targets, ``int64 (B, T)``, negative where there is no target.
            positions: Indices of the targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``.

        Returns:
            Output whose ``result`` is a ``DistillationSums``, to be passed to ``weigh``.
        """
        if self.model is not None:
            return score_beside_teacher(model, self.model, inputs, labels, self._objective, positions)
        with torch.no_grad(), adapters_off(extract_model_from_parallel(model)):
            # Hidden states (N, H) instead of logits (N, V): the head computes these in chunks.
            states = model(**inputs, head=lambda hidden, *_, **__: pick_predictors(hidden, positions)).result
        # The output projection has no adapter, so it equals the base's.
        return score_beside_record(model, states, inputs, labels, self._objective, positions)

    def weigh(self, sums: DistillationSums) -> Tensor:
        """Return the sum over targets of cross-entropy and weighted divergence, in nats; differentiable."""
        return sums.loss_sum * self._scale


def load_base(config: RecipeConfig, attn_implementation: str) -> BaseDivergence | None:
    """Load the base of a run; ``None`` if ``kl_to_base`` is 0.

    Args:
        config: Run configuration.
        attn_implementation: Attention implementation of the trained model, since the base gets the same batches.

    Raises:
        ConfigError: The model cannot be loaded (``load_causal_lm``).
    """
    coefficient = config.forgetting.kl_to_base
    if not coefficient:
        return None
    base = None if config.adapter.use_peft else freeze(load_causal_lm(config.model, attn_implementation))
    return BaseDivergence(coefficient, base)

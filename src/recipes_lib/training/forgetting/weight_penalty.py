"""Elastic weight consolidation and L2-SP: a quadratic penalty on the distance of weights from a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import TrainerCallback, TrainerControl, TrainerState

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem, reported_at
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.checkpoints.sharded import shard_like
from recipes_lib.training.collectives import broadcast_object, get_rank
from recipes_lib.training.forgetting.fisher import read_fisher
from recipes_lib.training.layouts.fsdp import get_local, prepare_frozen
from recipes_lib.training.trainers.reference import hash_weights

PENALTY: Final = "ewc_penalty"
"""Metric of a logged step: the penalty before its update, including the factor ``ewc_lambda``."""


class WeightPenalty(TrainerCallback):
    """Penalty ``coefficient / 2 * sum F (w - w*)^2`` over all weights, applied once per optimizer step.

    Its gradient, ``coefficient * F (w - w*)``, is added in place to the complete data gradient, after the reduction
    over micro-batches and processes and before clipping. It is therefore independent of gradient accumulation and world
    size, and needs no autograd graph. ``F`` and ``w*`` are sharded like the weights.

    Source: Kirkpatrick et al. 2017 (arXiv 1612.00796, eq. 3); with ``F`` = 1 L2-SP, Xuhong et al. 2018 (arXiv
        1802.01483); ``tests/training/forgetting/test_weight_penalty.py``.
    """

    def __init__(self, coefficient: float, reference: nn.Module, fisher: Mapping[str, Tensor] | None) -> None:
        """Initialise the penalty; ``prepare`` shards reference and Fisher information.

        Args:
            coefficient: Coefficient of the penalty, ``ewc_lambda``.
            reference: Model with the weights ``w*`` in host memory.
            fisher: Unsharded ``F`` by parameter name; ``None``: 1.
        """
        self._coefficient = coefficient
        self._reference = reference
        self._whole_fisher = fisher
        # Reference and Fisher information (``None``: 1) by name, as local shards; and after each parameter.
        self._shards: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._terms: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        self._sum = torch.zeros(())

    def prepare(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Shard the reference like the model.

        Args:
            accelerator: Accelerator of the trainer.
            model: Model to train, not yet sharded.

        Raises:
            ConfigError: Names or shapes of the reference's weights differ from the model's.
        """
        shapes, others = (
            {name: tuple(part.shape) for name, part in each.named_parameters()} for each in (model, self._reference)
        )
        if names := _find_differing(shapes, others):
            found = f"{len(names)} weights have another name or shape in the reference than in the model: {names[0]}"
            raise ConfigError(Problem("ewc_reference", found, "name the model that training starts from"))
        frozen = prepare_frozen(accelerator, self._reference.requires_grad_(False))
        trained = _list_trained(model)
        for name, parameter in frozen.named_parameters():
            if name not in trained:
                continue
            own, fisher = get_local(parameter.detach()), None
            if self._whole_fisher is not None:
                fisher = get_local(shard_like(self._whole_fisher[name], parameter)).to(own.device)
            self._shards[name] = (own, fisher)
        # Frees the unsharded copies; the shards are all that training needs.
        self._reference, self._whole_fisher = nn.Module(), None

    @torch.no_grad()
    def add_gradients(self, scale: float = 1.0) -> None:
        """Add the penalty's gradient to the gradient of every parameter that has one.

        Args:
            scale: Factor of the present gradients, such as the loss scale of fp16.
        """
        self._sum = torch.zeros(())
        for parameter, reference, fisher in self._terms:
            if parameter.grad is None:
                continue
            # The penalty is elementwise, so that local shards need no communication.
            difference = get_local(parameter) - reference
            weighted = difference if fisher is None else fisher * difference
            get_local(parameter.grad).add_(weighted, alpha=self._coefficient * scale)
            # float32: bfloat16 has 8 bits, so that a sum over many parameters would stop growing.
            self._sum = self._sum + torch.dot(weighted.flatten(), difference.flatten().to(weighted.dtype)).float()

    def compute_value(self) -> float:
        """Return the penalty at the last ``add_gradients``, over all shards; every process must call."""
        value: Tensor = self._sum.detach()
        # FSDP2 shards all parameters, over one mesh.
        first, *_ = self._terms[0]
        if isinstance(first, DTensor):
            # Over a sharded mesh dimension the local sums add up; over a replicated one they are equal.
            placements = [Partial() if isinstance(each, Shard) else Replicate() for each in first.placements]
            mesh = first.device_mesh
            value = DTensor.from_local(value.to(mesh.device_type), mesh, placements).full_tensor()
        return self._coefficient / 2 * float(value)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Look up the parameters; only now, because FSDP2 replaces those of the original model."""
        named = kwargs["model"].named_parameters()
        self._terms = [(parameter, *self._shards[name]) for name, parameter in named if parameter.requires_grad]

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add the penalty to the metrics of a training step."""
        if logs is not None and "loss" in logs:
            logs[PENALTY] = self.compute_value()


def load_penalty(config: RecipeConfig) -> WeightPenalty | None:
    """Load reference weights and Fisher information; ``None`` if ``ewc_lambda`` is 0; every process must call.

    Raises:
        ConfigError: The reference cannot be loaded, has no Fisher information, or that of another model.
        DataError: The Fisher information cannot be read.
    """
    if not config.forgetting.ewc_lambda:
        return None
    where, model, fisher, expected = find_reference(config)
    with reported_at(where):
        reference = load_causal_lm(model, "eager")
    if fisher is not None:
        _verify(fisher, expected, reference, where)
    return WeightPenalty(config.forgetting.ewc_lambda, reference, fisher)


def find_reference(config: RecipeConfig) -> tuple[str, ModelConfig, Mapping[str, Tensor] | None, str]:
    """Return the reference's key, its model, Fisher information (``None``: the identity), and hash of weights.

    Raises:
        ConfigError: The reference has no Fisher information.
        DataError: The Fisher information cannot be read.
    """
    keys, model = config.forgetting, config.model
    where = config.locate("ewc_reference" if keys.ewc_reference else "ewc_lambda")
    if keys.ewc_reference is not None:
        model = replace(model, model_name_or_path=keys.ewc_reference, model_revision=None)
    if keys.ewc_fisher != "diagonal":
        return where, model, None, ""
    fisher, record = read_fisher(Path(str(model.model_name_or_path)), where)
    if record.get("model_name_or_path") is not None:
        name, revision = record["model_name_or_path"], record.get("model_revision")
        model = replace(model, model_name_or_path=name, model_revision=revision)
    return where, model, fisher, record["weights"]


def _verify(fisher: Mapping[str, Tensor], expected: str, reference: nn.Module, where: str) -> None:
    """Verify that the Fisher information was computed at the weights of the reference.

    Raises:
        ConfigError: A name, a shape or the hash of the weights differs.
    """
    wrong = _find_differing(_list_trained(reference), {name: tuple(value.shape) for name, value in fisher.items()})
    found = f"has {len(wrong)} weights of another shape or name, such as {wrong[0]}" if wrong else None
    # Rank 0 decides: with low-memory loading, the other ranks have no weights yet.
    if found is None and not broadcast_object(get_rank() != 0 or hash_weights(reference) == expected):
        found = "was computed at other weights, or in another `dtype`"
    if found is not None:
        remedy = "run `recipes fisher` again, with the recipe of the run that made the model"
        raise ConfigError(Problem(where, f"the Fisher information {found}", remedy))


def _list_trained(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def _find_differing(shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> list[str]:
    return sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name))

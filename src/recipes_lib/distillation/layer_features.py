"""Hidden-state and attention distillation: forward hooks collect features, losses compare them at target positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.config.schema import RELATION_WEIGHTS, WEIGHTS, LayersConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.distillation import RELATIONS, compute_attention_sum, compute_feature_sum, compute_relation_sum
from recipes_lib.losses.next_token import index_targets
from recipes_lib.models.structure import LayerFeatures, collect_features, find_layers, map_layers, verify_layers
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, compare_state, write_state
from recipes_lib.training.checkpoints.sharded import gather_trained_state, shard_like
from recipes_lib.training.optim.optimizers import split_groups

PROJECTIONS: Final = "feature_projections"
"""Name of the projections' module in the student during training."""
PROJECTIONS_FILE: Final = "feature_projections.pt"


class TargetPositions:
    """Positions of a batch whose hidden states predict a target.

    Attributes:
        indices: Those positions in the flattened batch, ``int64 (N,)``.
        lengths: Number of those positions in each document that has any, in order.
    """

    def __init__(self, labels: Tensor, position_ids: Tensor) -> None:
        """Find the positions.

        Args:
            labels: Unshifted labels, ``int64 (B, L)``; negative where there is no target.
            position_ids: Positions in documents, ``int64 (B, L)``; 0 where a document begins.
        """
        # The last position of a row predicts nothing.
        self.indices = index_targets(functional.pad(labels[:, 1:], (0, 1), value=-1))
        # The cumulative count of zeros in position_ids numbers the documents of the whole batch: (B L), then (N,).
        documents = position_ids.flatten().eq(0).cumsum(0).index_select(0, self.indices)
        _, counts = documents.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        self.lengths: list[int] = counts.tolist()

    def take(self, states: Tensor) -> Tensor:
        """Return the values of a tensor ``(B, L, ...)`` at these positions, ``(N, ...)``."""
        # Not by a mask, which is searched each time, while the host waits, and sorted in the backward pass.
        return states.flatten(0, 1).index_select(0, self.indices)

    def take_attention(self, attentions: Tensor) -> Tensor:
        """Return the attention of these positions averaged over heads, ``(N, L)``, from ``(B, H, L, L)``."""
        return self.take(attentions.float().mean(dim=1))


class LayerDistillation:
    """Losses between layers of student and teacher, and their trained projections.

    Each loss is a sum over targets, averaged over the compared layers; like the rest of the loss, it is divided by the
    number of targets of the whole step. During training the projections are a module of the student, so that gradient
    reduction, clipping and guards include them; for saving they are detached.

    Source: ``tests/distillation/test_layer_features.py``, ``tests/distributed/test_distill.py``.
    """

    def __init__(self, config: LayersConfig, student: Any, teacher: Any, *, seed: int = 0) -> None:
        """Choose the compared layers, and initialise the projections.

        Args:
            config: Weights and layers.
            student: Student model without wrapper.
            teacher: Frozen teacher, not yet sharded; ``None`` if its layers are not compared.
            seed: Seed of projections between hidden states of different width.

        Raises:
            ConfigError: The student lacks a named layer; or as ``verify_layers``.
        """
        self.config = config
        self._student, self._teacher = student, teacher
        self._projections = nn.ModuleDict()
        if not self.is_used:
            return
        self._features, self._relations = choose_layers(config, len(find_layers(student)))
        mapped = map_layers(len(find_layers(student)), len(find_layers(teacher)))
        # Student layer to teacher layer, both from 1.
        self._teacher_layers = dict(enumerate(mapped, start=1))
        for model in (student, teacher):
            verify_layers(model, attentions=bool(config.attention_weight))
        width, teacher_width = (model.config.get_text_config().hidden_size for model in (student, teacher))
        generator = torch.Generator().manual_seed(seed)
        for number in self._features:
            self._projections[str(number)] = _build_projection(width, teacher_width, generator)
        self._projections.to(student.device)

    @property
    def is_used(self) -> bool:
        """Whether any layer loss has a positive weight."""
        return any(getattr(self.config, key) for key in WEIGHTS)

    @contextmanager
    def capture_features(self, labels: Tensor, position_ids: Tensor) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Collect the outputs of the compared layers during one forward pass of student and teacher.

        Args:
            labels: Unshifted labels, ``int64 (B, L)``; negative where there is no target.
            position_ids: Positions in documents, ``int64 (B, L)``; 0 where a document begins.

        Yields:
            Function that returns the sum of each layer loss over the targets, a differentiable scalar, by name, after
            both forward passes.
        """
        if not self.is_used:
            yield dict
            return
        positions = TargetPositions(labels, position_ids)
        states = sorted({*self._features, *self._relations})
        attentions = self._relations if self.config.attention_weight else ()
        with (
            collect_features(self._student, states=states, attentions=attentions) as student,
            collect_features(
                self._teacher,
                states=sorted({self._teacher_layers[number] for number in states}),
                attentions=sorted({self._teacher_layers[number] for number in attentions}),
                # Selected in the hook, so that outputs at other positions are freed. The student's are kept whole:
                # selection saves tensors for backward, which recomputation under checkpointing would not repeat.
                read_states=positions.take,
                read_attentions=positions.take_attention,
            ) as teacher,
        ):
            yield partial(self._compute_parts, positions, student, teacher)

    def _compute_parts(
        self, positions: TargetPositions, student: LayerFeatures, teacher: LayerFeatures
    ) -> dict[str, Tensor]:
        """Return the layer losses by features of the student at all positions, and of the teacher at compared ones."""
        config, parts = self.config, dict[str, Tensor]()
        for number in self._features:
            pair = positions.take(student.states[number]), teacher.states[self._teacher_layers[number]]
            # Unsharded at this point under FSDP2 too: with accelerate 1.15, parameters outside of the layers belong to
            # the root module, which stays gathered after the forward pass.
            weight: Any = self._projections[str(number)].weight
            _add(parts, "feature", compute_feature_sum(*pair, weight, config.feature_loss), len(self._features))
        for number in self._relations:
            if config.attention_weight:
                attended = positions.take_attention(student.attentions[number])
                target = teacher.attentions[self._teacher_layers[number]]
                _add(parts, "attention", compute_attention_sum(attended, target), len(self._relations))
            for name in RELATIONS:
                if getattr(config, f"{name}_weight"):
                    pair = positions.take(student.states[number]), teacher.states[self._teacher_layers[number]]
                    _add(parts, name, compute_relation_sum(*pair, positions.lengths, name), len(self._relations))
        return parts

    def weigh(self, parts: Mapping[str, Tensor]) -> Tensor | float:
        """Return the weighted sum of the layer losses; 0 if there are none."""
        return sum((part * float(getattr(self.config, f"{name}_weight")) for name, part in parts.items()), 0.0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the projections to the student within the context."""
        if self._projections:
            self._student.add_module(PROJECTIONS, self._projections)
        try:
            yield
        finally:
            if self._projections:
                delattr(self._student, PROJECTIONS)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Detach the projections within the context, so that the saved student does not contain them."""
        if not hasattr(self._student, PROJECTIONS):
            yield
            return
        delattr(self._student, PROJECTIONS)
        try:
            yield
        finally:
            self._student.add_module(PROJECTIONS, self._projections)

    def split_group(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the projections to a separate parameter group without weight decay, which would shrink them to 0.

        Args:
            optimizer: Optimizer over the student with the attached projections.
        """
        own = {id(parameter) for parameter in self._projections.parameters()}
        split_groups(optimizer, own, lambda _: {"lr": self.config.projection_learning_rate, "weight_decay": 0.0})

    def add_to(self, staged: Staged, saver: CheckpointSaver) -> Staged:
        """Add the projections, if any, to a checkpoint; a collective that every process must enter.

        Args:
            staged: Checkpoint of the student without the projections.
            saver: Saver whose buffers hold the copy while training continues.
        """
        if not self._projections:
            return staged
        gathered = gather_trained_state(self._projections)
        if not saver.is_main:
            return staged
        state, path = saver.take(gathered), staged.folder / PROJECTIONS_FILE

        def write() -> None:
            write_state(state, path)
            compare_state(path, state)

        return replace(staged, tasks=[*staged.tasks, write])

    def load(self, checkpoint: Path) -> None:
        """Load the projections of a checkpoint, if there are any."""
        if self._projections:
            state = torch.load(checkpoint / PROJECTIONS_FILE, map_location="cpu", weights_only=True)
            # In place, because the optimizer references these parameters.
            with torch.no_grad():
                for name, parameter in self._projections.named_parameters():
                    parameter.copy_(shard_like(state[name], parameter))

    def name_parameters(self) -> dict[str, nn.Parameter]:
        """Return the projections by their names in the student with attached projections."""
        return {f"{PROJECTIONS}.{name}": parameter for name, parameter in self._projections.named_parameters()}


def choose_layers(config: LayersConfig, num_layers: int) -> tuple[list[int], list[int]]:
    """Return the numbers of student layers compared by hidden states, and of those compared by relations; from 1.

    Args:
        config: Weights and layers.
        num_layers: Layers of the student.

    Raises:
        ConfigError: The student lacks a named layer.
    """
    features = config.feature_layers or list(range(1, num_layers + 1))
    relations = config.relation_layers or [num_layers]
    for key, named in (("feature_layers", features), ("relation_layers", relations)):
        if max(named) > num_layers:
            found = f"`{key}` names layer {max(named)}, and the student has {num_layers} layers"
            raise ConfigError(Problem(key, found, f"write numbers from 1 to {num_layers}"))
    has_relations = any(getattr(config, key) for key in RELATION_WEIGHTS)
    return sorted(features) if config.feature_weight else [], sorted(relations) if has_relations else []


def _build_projection(width: int, teacher_width: int, generator: torch.Generator) -> nn.Linear:
    """Build a projection that preserves the root mean square of a state: the identity for equal widths."""
    # From meta: the default initialisation would consume the global random state of the run.
    projection = nn.Linear(width, teacher_width, bias=False, device="meta").to_empty(device="cpu")
    if width == teacher_width:
        nn.init.eye_(projection.weight)
    else:
        # Orthonormal columns preserve the norm of a state; the gain preserves its mean square at a larger width.
        gain = math.sqrt(teacher_width / min(width, teacher_width))
        nn.init.orthogonal_(projection.weight, gain=gain, generator=generator)
    return projection


def _add(parts: dict[str, Tensor], name: str, part: Tensor, num_layers: int) -> None:
    parts[name] = parts.get(name, 0) + part / num_layers

"""Hidden-state and attention distillation: forward hooks collect features, losses compare them at target positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from recipes_lib.config.schema import RELATION_WEIGHTS, WEIGHTS, LayersConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.distillation import (
    RELATIONS,
    compute_attention_sum,
    compute_feature_sum,
    compute_relation_sum,
)
from recipes_lib.models.structure import LayerFeatures, collect_features, find_layers, map_layers, verify_layers
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, compare_state, write_state
from recipes_lib.training.checkpoints.sharded import gather_trained_state, shard_like
from recipes_lib.training.optim.optimizers import split_groups

PROJECTIONS: Final = "feature_projections"
"""Under which they are a part of the student while it trains."""
PROJECTIONS_FILE: Final = "feature_projections.pt"


@dataclass(frozen=True, slots=True)
class TargetPositions:
    """Positions of a batch whose hidden states predict a target.

    Attributes:
        is_target: ``bool (B, L - 1)``.
        lengths: How many of them each document has, document behind document.
    """

    is_target: Tensor
    lengths: list[int]

    def take(self, states: Tensor) -> Tensor:
        """Return the values of a tensor ``(B, L, ...)`` at these positions, ``(N, ...)``."""
        # The state at a position predicts the token behind it.
        return states[:, :-1][self.is_target]

    def take_attention(self, attentions: Tensor) -> Tensor:
        """Return the head-averaged attention of ``(B, H, L, L)`` from these positions, ``(N, L)``."""
        return self.take(attentions.float().mean(dim=1))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Collected features of a batch.

    Attributes:
        places: Where it is compared.
        student: As its layers gave it.
        teacher: At the places.
    """

    places: TargetPositions
    student: LayerFeatures
    teacher: LayerFeatures


def find_target_positions(labels: Tensor, position_ids: Tensor) -> TargetPositions:
    """Return the target positions of a batch.

    Args:
        labels: ``int64 (B, L)``, unshifted, negative where there is no target.
        position_ids: ``int64 (B, L)``, 0 where a document begins.
    """
    is_target = labels[:, 1:] >= 0
    # Each 0 among the positions begins a document: their running count numbers the documents of the whole batch. The
    # last column predicts nothing.
    documents = position_ids.flatten().eq(0).cumsum(0).view_as(position_ids)[:, :-1][is_target]
    _, counts = documents.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    return TargetPositions(is_target, counts.tolist())


class LayerDistillation:
    """Layer losses and their projections.

    Each loss is a sum over targets, averaged over the compared layers; like the rest of the loss, it is divided by the
    number of targets of the whole step. The projections are attached to the student as a module, so that reduction,
    clipping, guards and checks include their gradients; for saving they are detached.

    Source: ``tests/distillation/test_layer_features.py``, ``tests/distributed/test_distill.py``.
    """

    def __init__(self, config: LayersConfig, student: Any, teacher: Any, *, seed: int = 0) -> None:
        """Choose the compared layers, and initialise the projections.

        Args:
            config: Weights and layers.
            student: What is trained, without wrapper.
            teacher: The frozen one, not yet sharded; ``None`` where its layers are not compared.
            seed: Of projections between states of different width.

        Raises:
            ConfigError: A layer is named that the student does not have; or as ``verify_layers``.
        """
        self.config = config
        self._student, self._teacher = student, teacher
        self._projections = nn.ModuleDict()
        if not self.is_used:
            return
        self._features, self._relations = choose_layers(config, len(find_layers(student)))
        mapped = map_layers(len(find_layers(student)), len(find_layers(teacher)))
        self._answers = dict(enumerate(mapped, start=1))
        for model in (student, teacher):
            verify_layers(model, attentions=bool(config.attention_weight))
        width, aim = (model.config.get_text_config().hidden_size for model in (student, teacher))
        generator = torch.Generator().manual_seed(seed)
        for number in self._features:
            self._projections[str(number)] = _build_projection(width, aim, generator)
        self._projections.to(student.device)

    @property
    def is_used(self) -> bool:
        """Whether any loss has a weight."""
        return any(getattr(self.config, key) for key in WEIGHTS)

    @contextmanager
    def collecting(self, labels: Tensor, position_ids: Tensor) -> Iterator[Comparison | None]:
        """Collect the outputs of the compared layers of student and teacher, for one forward pass of each.

        Args:
            labels: As for ``find_target_positions``.
            position_ids: As for ``find_target_positions``.
        """
        if not self.is_used:
            yield None
            return
        places = find_target_positions(labels, position_ids)
        has_states = any((self.config.similarity_weight, self.config.distance_weight, self.config.angle_weight))
        states = sorted({*self._features, *(self._relations if has_states else ())})
        attentions = self._relations if self.config.attention_weight else ()
        with (
            collect_features(self._student, states=states, attentions=attentions) as own,
            collect_features(
                self._teacher,
                states=sorted({self._answers[number] for number in states}),
                attentions=sorted({self._answers[number] for number in attentions}),
                # Other outputs of the teacher are not stored.
                read_states=places.take,
                read_attentions=places.take_attention,
            ) as other,
        ):
            yield Comparison(places, own, other)

    def compute_parts(self, features: Comparison | None) -> dict[str, Tensor]:
        """Return the sum of each loss over the targets, a differentiable scalar, by name.

        Args:
            features: From ``collecting``, after both have run.
        """
        config, parts = self.config, dict[str, Tensor]()
        if features is None:
            return parts
        places, own, other = features.places, features.student, features.teacher
        for number in self._features:
            pair = places.take(own.states[number]), other.states[self._answers[number]]
            # Under FSDP2 it is gathered here: accelerate 1.15 leaves modules outside of layers gathered after the
            # forward pass.
            weight: Any = self._projections[str(number)].weight
            _add(parts, "feature", compute_feature_sum(*pair, weight, config.feature_loss), len(self._features))
        for number in self._relations:
            if config.attention_weight:
                pair = places.take_attention(own.attentions[number]), other.attentions[self._answers[number]]
                _add(parts, "attention", compute_attention_sum(*pair), len(self._relations))
            for name in RELATIONS:
                if getattr(config, f"{name}_weight"):
                    pair = places.take(own.states[number]), other.states[self._answers[number]]
                    _add(parts, name, compute_relation_sum(*pair, places.lengths, name), len(self._relations))
        return parts

    def weigh(self, parts: Mapping[str, Tensor]) -> Tensor | float:
        """Return the weighted sum of the losses."""
        weighed = [part * float(getattr(self.config, f"{name}_weight")) for name, part in parts.items()]
        return sum(weighed, 0.0)

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
        """Move the projections to their own parameter group, without weight decay, which would shrink them to 0.

        Args:
            optimizer: As for ``split_groups``, over the student with them.
        """
        own = {id(parameter) for parameter in self._projections.parameters()}
        split_groups(optimizer, own, lambda _: {"lr": self.config.projection_learning_rate, "weight_decay": 0.0})

    def add_to(self, staged: Staged, saver: CheckpointSaver) -> Staged:
        """Write the projections beside the student, if there are any; every process must call.

        Args:
            staged: A checkpoint of the student, without them.
            saver: What copies what training continues to change.
        """
        if not self._projections:
            return staged
        whole = gather_trained_state(self._projections)
        if not saver.is_main:
            return staged
        state, path = saver.take(whole), staged.folder / PROJECTIONS_FILE

        def write() -> None:
            write_state(state, path)
            compare_state(path, state)

        return replace(staged, tasks=[*staged.tasks, write])

    def load(self, checkpoint: Path) -> None:
        """Load the projections of a checkpoint, if there are any."""
        if self._projections:
            state = torch.load(checkpoint / PROJECTIONS_FILE, map_location="cpu", weights_only=True)
            # In place, since the optimizer holds these parameters.
            with torch.no_grad():
                for name, parameter in self._projections.named_parameters():
                    parameter.copy_(shard_like(state[name], parameter))

    def name_parameters(self) -> dict[str, nn.Parameter]:
        """Return the projections by their names in the student while they are attached."""
        return {f"{PROJECTIONS}.{name}": parameter for name, parameter in self._projections.named_parameters()}


def choose_layers(config: LayersConfig, num_layers: int) -> tuple[list[int], list[int]]:
    """Return the student layers compared by hidden states, and those compared by relations.

    Args:
        config: Weights and layers.
        num_layers: Of the student.

    Raises:
        ConfigError: One is named that it does not have.
    """
    features = config.feature_layers or list(range(1, num_layers + 1))
    relations = config.relation_layers or [num_layers]
    for key, named in (("feature_layers", features), ("relation_layers", relations)):
        if max(named) > num_layers:
            found = f"`{key}` names layer {max(named)}, and the student has {num_layers}"
            raise ConfigError(Problem(key, found, f"write numbers from 1 to {num_layers}"))
    has_relations = any(getattr(config, key) for key in RELATION_WEIGHTS)
    return sorted(features) if config.feature_weight else [], sorted(relations) if has_relations else []


def _build_projection(width: int, aim: int, generator: torch.Generator) -> nn.Linear:
    """Matrix that preserves the root mean square of a state: the identity for equal widths."""
    projection = nn.Linear(width, aim, bias=False, device="meta").to_empty(device="cpu")
    if width == aim:
        nn.init.eye_(projection.weight)
    else:
        # For a wider state, the leading directions are kept, scaled to preserve the size.
        gain = math.sqrt(aim / min(width, aim))
        nn.init.orthogonal_(projection.weight, gain=gain, generator=generator)
    return projection


def _add(parts: dict[str, Tensor], name: str, part: Tensor, num_layers: int) -> None:
    parts[name] = parts.get(name, 0) + part / num_layers

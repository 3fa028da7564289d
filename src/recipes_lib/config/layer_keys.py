"""The keys of what a student learns from the layers of its teacher, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem

RELATION_WEIGHTS: Final = ("attention_weight", "similarity_weight", "distance_weight", "angle_weight")
WEIGHTS: Final = ("feature_weight", *RELATION_WEIGHTS)
"""The keys that turn a part of the loss on; each part is its own figure of a logged step."""

_OPTIONS: Final = {
    "feature_loss": ("feature_weight",),
    "feature_layers": ("feature_weight",),
    "projection_learning_rate": ("feature_weight",),
    "relation_layers": RELATION_WEIGHTS,
}
"""Keys that say how a part is computed, and the weights of which one must be above 0."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """What a student learns from the layers of its teacher, in addition to what the teacher says of the tokens."""

    feature_weight: float = 0.0
    """Weight of the difference of hidden states, in mapped layers and through a learned projection for each."""
    feature_loss: Literal["mse", "cosine"] = "mse"
    """Difference of hidden states: ``mse`` of states of mean square 1, or one minus their ``cosine``."""
    feature_layers: list[int] | None = None
    """Layers of the student, from 1, whose hidden states are compared. Unset: all of them."""
    projection_learning_rate: float = 1e-3
    """Peak learning rate of the projections, which begin anew; their schedule is that of the student."""
    attention_weight: float = 0.0
    """Weight of the KL from the teacher's attention, the mean of a layer's heads; ``attn_implementation: eager``."""
    similarity_weight: float = 0.0
    """Weight of the difference of the cosines between the tokens of a document."""
    distance_weight: float = 0.0
    """Weight of the difference of the distances between the tokens of a document, in units of their mean (RKD)."""
    angle_weight: float = 0.0
    """Weight of the difference of the angles between the tokens of a document (RKD)."""
    relation_layers: list[int] | None = None
    """Layers of the student, from 1, whose attention and relations between tokens are compared. Unset: the last."""


def check_layers(settings: Settings) -> Iterator[Problem]:
    """Layers are compared with those of a live teacher; attention with attention that exists."""
    weighed = [key for key in WEIGHTS if settings[key]]
    if weighed and settings.gives("teacher_top_k"):
        found = f"`{weighed[0]}` needs the teacher's layers, and `teacher_top_k` has only what it said of the tokens"
        remedy = f"delete one of the two lines ({settings.where('teacher_top_k')})"
        yield Problem(settings.where(weighed[0]), found, remedy)
    if weighed and settings["torch_compile"]:
        found = f"`torch_compile` leaves out what `{weighed[0]}` listens with ({settings.where(weighed[0])})"
        yield Problem(settings.where("torch_compile"), found, "delete one of the two lines")
    if settings["attention_weight"] and settings["attn_implementation"] != "eager":
        found = "`attention_weight` compares attention, which every kernel but `eager` never has in memory"
        yield Problem(settings.where("attention_weight"), found, "write `attn_implementation: eager`, or delete it")
    for key, deciders in _OPTIONS.items():
        if settings.gives(key) and not any(settings[decider] for decider in deciders):
            found = f"`{key}` has no effect: `{'`, `'.join(deciders)}` {'are' if len(deciders) > 1 else 'is'} 0"
            yield Problem(settings.where(key), found, "give a weight, or delete the line")
    for key in ("feature_layers", "relation_layers"):
        layers = settings[key]
        if layers is not None and (not layers or min(layers) < 1 or len(set(layers)) < len(layers)):
            found = f"`{key}` is {layers}: layers are counted from 1, and each is compared once"
            yield Problem(settings.where(key), found, "write such as [4, 8], or delete the line for the default")

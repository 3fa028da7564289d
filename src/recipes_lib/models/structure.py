"""Structure of a model: layers and hidden states, layer mapping and pruning, the text part of multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import compute_probe_logits, evaluating, find_device, kernel_precision

Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """Outputs of the layers in the last forward pass, by layer number, from 1.

    Attributes:
        states: Hidden states behind a layer, ``(B, L, D)``; of the last one behind the final norm, as upstream has it.
        attentions: Attention of its heads, ``(B, H, L, L)``.
    """

    states: dict[int, Tensor] = field(default_factory=dict)
    attentions: dict[int, Tensor] = field(default_factory=dict)


def map_layers(num_student: int, num_teacher: int) -> tuple[int, ...]:
    """Return for each layer ``k`` of a student, from 1, the corresponding layer of its teacher.

    It is ``k * num_teacher / num_student``, rounded half up: last to last, the others evenly spaced.

    Source: Sun et al. 2019 (PKD-Skip, arXiv 1908.09355) and Jiao et al. 2020 (arXiv 1909.10351), where one number of
        layers divides the other; ``tests/models/test_structure.py``.
    """
    # floor(k T / S + 1 / 2) in integers.
    return tuple((2 * number * num_teacher + num_student) // (2 * num_student) for number in range(1, num_student + 1))


def find_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a causal language model, in their order.

    Raises:
        ConfigError: They are not where every architecture of transformers has them, in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    found = f"{type(model).__name__} has no list of its {count} layers"
    raise ConfigError(Problem("model_name_or_path", found, "choose another architecture"))


@contextmanager
def collect_features(
    model: Any,
    *,
    states: Collection[int] = (),
    attentions: Collection[int] = (),
    read_states: Read = lambda states: states,
    read_attentions: Read = lambda attentions: attentions,
) -> Iterator[LayerFeatures]:
    """Collect the outputs of some layers within the context; each forward pass replaces the previous ones.

    Other layers are not stored, unlike with ``output_hidden_states``. Recomputation in the backward pass happens
    outside of the context, without the hooks: ``read_...`` functions that save tensors for it would make it differ.

    Args:
        model: A causal language model, without wrapper.
        states: Layers whose hidden states are kept.
        attentions: Layers whose attention is kept; only ``eager`` has it.
        read_states: What is kept of hidden states; for a model that is trained, they themselves.
        read_attentions: What is kept of attention; likewise.

    Raises:
        ConfigError: As ``find_layers``; or a layer has no attention that can be collected.
    """
    layers, features = find_layers(model), LayerFeatures()

    def keep(kept: dict[int, Tensor], number: int, read: Read, at: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            kept[number] = read(output if isinstance(output, Tensor) else output[at])

        return hook

    handles = []
    for number in states:
        # The model's own last hidden state is behind the final norm.
        module = layers[number - 1] if number < len(layers) else model.base_model
        handles.append(module.register_forward_hook(keep(features.states, number, read_states, 0)))
    for number in attentions:
        attention = _find_attention(layers[number - 1])
        handles.append(attention.register_forward_hook(keep(features.attentions, number, read_attentions, 1)))
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def verify_layers(model: Any, *, attentions: bool) -> None:
    """Compare the collected features of every layer with the hidden states that the model returns, on eight tokens.

    Args:
        model: A causal language model; its mode is left alone.
        attentions: Whether attention maps are collected too, which needs ``attn_implementation: eager``.

    Raises:
        ConfigError: As ``collect_features``; or they differ.
    """
    config = model.config.get_text_config()
    input_ids = torch.arange(1, 9, device=find_device(model))[None] % config.vocab_size
    numbers = range(1, config.num_hidden_layers + 1)
    collecting = collect_features(model, states=numbers, attentions=numbers if attentions else ())
    with evaluating(model), kernel_precision(model), collecting as features:
        own: Any = model.base_model(
            input_ids=input_ids, use_cache=False, output_hidden_states=True, output_attentions=attentions
        )
    pairs = [(features.states, own.hidden_states[1:]), (features.attentions, own.attentions if attentions else ())]
    for kept, expected in pairs:
        if len(kept) != len(expected) or not all(map(torch.equal, [kept[number] for number in sorted(kept)], expected)):
            found = f"what leaves the layers of {type(model).__name__} is not what it returns as hidden states"
            remedy = "choose another architecture, or learn from what the teacher says alone"
            raise ConfigError(Problem("model_name_or_path", found, remedy))


def _find_attention(layer: nn.Module) -> nn.Module:
    for module in layer.children():
        if type(module).__name__.endswith("Attention"):
            return module
    found = f"{type(layer).__name__} has no attention that can be collected"
    raise ConfigError(Problem("attention_weight", found, "delete the line"))


def prune_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Reduce a causal language model and its configuration to some of its layers, in the given order.

    Embeddings, final norm, output projection and all widths are unchanged. Per-layer lists of the configuration, such
    as ``layer_types``, are reduced to the remaining layers.

    Args:
        model: Changed in place, in weights and configuration.
        layers: Their numbers, from 1.

    Raises:
        ConfigError: The model has no such layer, or none is left.

    Source: Sanh et al. 2019 (DistilBERT, arXiv 1910.01108, section 3), which takes every second layer;
        ``tests/models/test_layer_copy.py``.
    """
    whole = find_layers(model)
    count = len(whole)
    if not layers or min(layers) < 1 or max(layers) > count:
        found = f"layers {list(layers)} are asked for, and {type(model).__name__} has 1 to {count}"
        raise ConfigError(Problem("--layers", found, "name layers that it has"))
    kept = nn.ModuleList(whole[number - 1] for number in layers)
    # The list is replaced where it is held, whatever the architecture calls it.
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is whole:
                setattr(parent, name, kept)
    config: Any = model.config.get_text_config()
    by_layer = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    config.num_hidden_layers = len(layers)
    for name, value in by_layer.items():
        setattr(config, name, [value[number - 1] for number in layers])


def verify_copy(student: PreTrainedModel, cut: PreTrainedModel, folder: Path) -> None:
    """Compare a reloaded student with the pruned model in memory, bit by bit.

    Args:
        student: From ``folder``.
        cut: By ``prune_layers``, on the same device and in the same precision.
        folder: To be named.

    Raises:
        ConfigError: A tensor differs; or the architecture treats layers by their place in the whole model, so that the
            loaded one says something else.
    """
    own, expected = student.state_dict(), cut.state_dict()
    differing = [name for name in expected if name not in own or not torch.equal(own[name], expected[name])]
    if differing or not torch.equal(compute_probe_logits(student), compute_probe_logits(cut)):
        what = f"the tensor {differing[0]}" if differing else "what it says"
        found = f"{type(cut).__name__} cannot be cut: loaded again from {folder}, {what} is another"
        raise ConfigError(Problem("--teacher", found, "name layers whose places in the model do not matter, or all"))


def find_outside_text(model: Any) -> list[str]:
    """Return the modules and parameters outside the text model, by path; the largest enclosing ones.

    These are parts of the base beside its text model, such as a vision tower and its projector; none for text-only
    configurations. Heads do not belong to the base.

    Args:
        model: With its head, before an adapter is put around it.

    Source: ``get_decoder`` of transformers; ``tests/models/test_text_part.py``.
    """
    if model.config.get_text_config() is model.config:
        return []
    paths = {id(module): path for path, module in model.named_modules()}
    text, base = paths[id(model.get_decoder())], paths[id(model.base_model)]
    if text == base:
        return []
    parts = model.get_submodule(base)
    names = [*dict(parts.named_children()), *dict(parts.named_parameters(recurse=False))]
    found = [f"{base}.{name}".removeprefix(".") for name in names]
    return [path for path in found if not is_outside(text, [path])]


def is_outside(path: str, parts: list[str]) -> bool:
    """Return whether a path is inside one of ``find_outside_text``."""
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def freeze_outside_text(model: Any) -> None:
    """Freeze the modules outside the text model; they are saved with the model, but not trained."""
    parts = find_outside_text(model)
    for name, parameter in model.named_parameters():
        if is_outside(name, parts):
            parameter.requires_grad_(False)

"""Base weights with the adapter added, under the checkpoint's names, for an inference engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recipes_lib.models.devices import unwrap_adapter

_BASE = ".base_layer."


def describe_weights(model: Any) -> list[tuple[str, str, list[int]]]:
    """Name, dtype (``bfloat16``) and shape of what ``iterate_weights`` yields, in its order."""
    return [
        (name.replace(_BASE, "."), str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
        for name, parameter in _base_parameters(model)
    ]


@torch.no_grad()
def iterate_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, under the name that it has without an adapter; the adapter that is on is added to it.

    One layer at a time has its adapter added, and afterwards the very bits that it had before: PEFT's ``unmerge``
    subtracts, which would leave a rounding in the weights that a reference shares.

    Args:
        model: A model, or a PEFT model of low rank around it.

    Raises:
        ValueError: The adapter lies on bare tensors or trains modules whole, which have other names then.

    Source: ``trl.generation.VLLMGeneration``; ``tests/models/adapters/test_merged_weights.py``.
    """
    layers = dict(unwrap_adapter(model).named_modules())
    for name, parameter in _base_parameters(model):
        owner, is_adapted, rest = name.partition(_BASE)
        if not is_adapted or rest != "weight":
            yield name.replace(_BASE, "."), parameter.detach()
            continue
        layer = layers[owner]
        before = parameter.detach().clone()
        layer.merge()
        merged = parameter.detach().clone()
        layer.unmerge()
        parameter.copy_(before)
        yield f"{owner}.{rest}", merged


def _base_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    base = unwrap_adapter(model)
    for module in base.modules():
        is_layer = not hasattr(module, "base_layer") or hasattr(module.base_layer, "weight")
        if hasattr(module, "modules_to_save") or not is_layer:
            raise ValueError(
                "an adapter on bare tensors, or on modules trained whole, is not added to weights one by one"
            )
    adapted = tuple(f"{name}." for name, module in base.named_modules() if hasattr(module, "base_layer"))
    for name, parameter in base.named_parameters():
        if _BASE in name or not name.startswith(adapted):
            yield name, parameter

"""The text model inside one of several modalities, which alone is trained here: no text passes through the rest."""

from __future__ import annotations

from typing import Any


def find_outside_text(model: Any) -> list[str]:
    """Return the modules and parameters of a model through which no text passes, by their paths; the largest ones.

    They are what its base holds beside its text model, such as a vision tower and what projects its features; none
    where the configuration is one of text alone. The heads are no part of the base.

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
    """Return whether a path lies in one of ``find_outside_text``."""
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def freeze_outside_text(model: Any) -> None:
    """Keep what no text passes through as it is: it is saved with the model, and never trained."""
    parts = find_outside_text(model)
    for name, parameter in model.named_parameters():
        if is_outside(name, parts):
            parameter.requires_grad_(False)

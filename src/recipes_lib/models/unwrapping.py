"""A model without the wrapper that PEFT puts around it."""

from __future__ import annotations

from typing import Any


def unwrap_adapter(model: Any) -> Any:
    """Return the model inside a PEFT wrapper, its layers still under their adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

"""Matrix products in 8-bit floats: asked for by the launch file, done by accelerate and torchao, refused where not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from recipes_lib.errors import ConfigError, Problem

MIN_CAPABILITY: Final = (8, 9)
"""Ada and Hopper: the first with 8-bit float products."""

_DIVISOR: Final = 16
_OTHERWISE: Final = "use another launch file, such as accelerate_configs/single_gpu.yaml"


def verify_fp8(launched_precision: str) -> None:
    """Refuse an fp8 launch that accelerate would turn into another precision, or could not make at all.

    Args:
        launched_precision: ``mixed_precision`` of the launch file.

    Raises:
        ConfigError: torchao is not installed.
        ConfigError: The device is no GPU with 8-bit products.

    Source: accelerate ``AcceleratorState``, which falls back to fp16; see ``tests/training/test_fp8.py``.
    """
    if launched_precision == "fp8" and (problems := list(_find_problems())):
        raise ConfigError(*problems)


def _find_problems() -> Iterator[Problem]:
    if importlib.util.find_spec("torchao") is None:
        yield Problem("launch", "fp8 needs the package torchao, which is not installed", "pip install torchao")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < MIN_CAPABILITY:
        has = "no GPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
        wanted = ".".join(map(str, MIN_CAPABILITY))
        yield Problem("launch", f"fp8 needs a GPU of compute capability {wanted} or higher; here is {has}", _OTHERWISE)


def verify_fp8_layers(model: nn.Module) -> None:
    """Refuse a model in which fp8 would change nothing.

    Raises:
        ConfigError: No layer but the first and the last is an ``nn.Linear`` whose sizes are multiples of 16.

    Source: accelerate ``filter_first_and_last_linear_layers``; see ``tests/training/test_fp8.py``.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not any(layer.in_features % _DIVISOR == 0 == layer.out_features % _DIVISOR for layer in linear[1:-1]):
        found = f"fp8 would change nothing: {type(model).__name__} has no inner nn.Linear with sizes in multiples of 16"
        raise ConfigError(Problem("launch", found, f"choose another model_type, or {_OTHERWISE}"))

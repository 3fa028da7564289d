"""Looking at what a model says, and leaving it in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recipes_lib.models.devices import find_device
from recipes_lib.models.varlen import register_varlen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in.

    Module by module, since a frozen part may be in evaluation mode on purpose.

    Source: ``tests/models/test_evaluation.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def suited_to_kernel(model: Any) -> Iterator[None]:
    """Have forward passes that no trainer has prepared run, whatever the kernel of the model.

    flash-attention multiplies in half precision only, so that products are in ``bfloat16``; and on GPUs only. While
    weights wait on the host, as they do until they are sharded, ``varlen`` computes the same from the same batches.

    Args:
        model: Of transformers or PEFT.

    Source: ``tests/models/test_evaluation.py``.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kernel, device = str(inner.config.get_text_config()._attn_implementation), find_device(model)
    if not kernel.startswith("flash_attention"):
        yield
    elif device.type != "cpu":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        register_varlen()
        inner.set_attn_implementation("varlen")
        try:
            yield
        finally:
            inner.set_attn_implementation(kernel)

"""Looking at what a model says, and leaving it in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from recipes_lib.models.devices import find_device


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


def halved_for_flash(model: Any) -> AbstractContextManager[Any]:
    """Products in ``bfloat16`` where the model's kernel is flash-attention, which multiplies in half precision only."""
    if "flash" not in str(model.config.get_text_config()._attn_implementation):
        return nullcontext()
    return torch.autocast(find_device(model).type, torch.bfloat16)

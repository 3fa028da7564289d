"""Forward passes outside of training: evaluation mode, restored afterwards, and dropout switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.devices import find_device, unwrap_adapter


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in.

    Module by module, since a frozen part may be in evaluation mode on purpose.

    Source: ``tests/models/test_inference.py``.
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
def kernel_precision(model: Any, *, is_packed: bool = False) -> Iterator[None]:
    """Have forward passes that no trainer has prepared run, whatever the kernel of the model.

    flash-attention multiplies in half precision only, so that products are in ``bfloat16``; and on GPUs only. While
    weights wait on the host, as they do until they are sharded, ``varlen`` computes the same from the same batches. On
    GPUs ``varlen`` too takes documents that share a row in half precision only; all else it computes as ``sdpa`` does.

    Args:
        model: Of transformers or PEFT.
        is_packed: Whether documents share rows.

    Source: ``tests/models/test_inference.py``.
    """
    inner = unwrap_adapter(model)
    kernel, device = str(inner.config.get_text_config()._attn_implementation), find_device(model)
    is_flash = kernel.startswith("flash_attention")
    if device.type == "cuda" and (is_flash or (is_packed and kernel == "varlen")):
        with torch.autocast(device.type, torch.bfloat16):
            yield
    elif not is_flash:
        yield
    else:
        register_varlen()
        inner.set_attn_implementation("varlen")
        try:
            yield
        finally:
            inner.set_attn_implementation(kernel)


def find_rounding_error(states: Tensor) -> float:
    """Return by what share of itself a product behind ``states`` may be rounded: under autocast, more than they are.

    Args:
        states: Floating-point numbers of any shape; ask in the context in which they were computed.

    Source: ``tests/models/test_inference.py``.
    """
    kind = states.device.type
    dtypes = {states.dtype, torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else {states.dtype}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout of a model to 0, modules and the plain numbers that attention layers keep; return how many.

    Source: ``trl.trainer.utils.disable_dropout_in_model`` leaves the numbers, such as Llama's ``attention_dropout``;
    ``tests/models/test_dropout.py``.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.p = 0.0
            count += 1
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)
                count += 1
    return count

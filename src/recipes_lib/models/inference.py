"""Forward passes outside of training: the device, evaluation mode, precision of kernels, dropout, random states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.generic import is_flash_attention_requested

from recipes_lib.models.attention.varlen import register_varlen


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
    is_flash = is_flash_attention_requested(requested_attention_implementation=kernel)
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


def unwrap_adapter(model: Any) -> Any:
    """Return the model inside a PEFT wrapper, its layers still under their adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on: what it is given and what it returns lie there.

    Weights that FSDP2 offloads wait on the host; the mesh that shares them out says where they are gathered.

    Source: torch ``CPUOffloadPolicy``; ``tests/models/test_inference.py``.
    """
    weight = next(model.parameters())
    if not isinstance(weight, DTensor) or weight.device_mesh.device_type == weight.device.type:
        return weight.device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


@contextmanager
def inputs_moved_to_device(model: Any) -> Iterator[None]:
    """Have a model whose weights wait elsewhere bring what it is given to where it computes.

    ``generate`` brings it to where the weights are. FSDP2 brings it back before the outermost call alone, and that is
    ``generate`` itself.

    Args:
        model: Of transformers or PEFT; where it computes where its weights are there is nothing to do.

    Source: ``tests/distributed/test_simulated_device.py``.
    """
    device = find_device(model)
    if model.device == device:
        yield
        return

    def bring(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, device), send_to_device(kwargs, device)

    inner = unwrap_adapter(model)
    handle = inner.register_forward_pre_hook(bring, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of Python, numpy, torch and every CUDA device at one moment."""

    _python: Any
    _numpy: Any
    _torch: torch.Tensor
    _cuda: Sequence[torch.Tensor]

    @classmethod
    def read(cls) -> RandomStates:
        """Return what they are now."""
        # The global numpy generator, because data collators and libraries draw from it.
        numpy_state = np.random.get_state()  # noqa: NPY002
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda_states = torch.cuda.get_rng_state_all() if is_used else []
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda_states)

    def restore(self) -> None:
        """Make them what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation without gradients; afterwards every mode and random state is what it was.

    The random states are Python's, numpy's, torch's and that of every CUDA device.

    Source: ``tests/models/test_training_state.py``.
    """
    states = RandomStates.read()
    try:
        with evaluating(model):
            yield
    finally:
        states.restore()

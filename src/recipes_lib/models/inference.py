"""Forward passes outside of training: device, evaluation mode, precision of attention kernels, random states."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel, send_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.generic import is_flash_attention_requested

from recipes_lib.models.attention.varlen import register_varlen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with ``model`` in evaluation mode and without gradients; restores the mode of every module.

    Modes are restored per module, because frozen parts may be in evaluation mode during training.

    Source: ``tests/models/test_inference.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            # Not by train(), which would set the children too.
            module.training = mode


@contextmanager
def kernel_precision(model: Any, *, is_packed: bool = False) -> Iterator[None]:
    """Context for forward passes outside of the trainer, with a precision that the attention kernel supports.

    flash-attention supports half precision only: matrix products are under ``bfloat16`` autocast. It also supports GPUs
    only: while weights are on the host, as before sharding, ``varlen`` replaces it with equal results. On GPUs,
    ``varlen`` needs half precision for packed documents; otherwise it computes like ``sdpa``.

    Args:
        model: Model, with or without a PEFT wrapper.
        is_packed: Whether several documents share a row.

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
        # flash-attention on a CPU: the equivalent kernel for the same batch layout.
        register_varlen()
        inner.set_attn_implementation("varlen")
        try:
            yield
        finally:
            inner.set_attn_implementation(kernel)


def compute_probe_logits(model: Any, ids: Tensor | None = None) -> Tensor:
    """Return the logits of a few tokens, ``float32 (1, L, V)``, on the CPU; scores ``(1, n)`` of a classifier.

    With sharded weights, this is a collective that every process must enter. Modes are restored.

    Args:
        model: Model, with or without a PEFT wrapper.
        ids: Token ids, ``int64 (L,)``. Default: eight fixed ones.
    """
    if ids is None:
        ids = torch.arange(1, 9) % model.config.get_text_config().vocab_size
    input_ids = ids[None].to(find_device(model))
    with evaluating(model), kernel_precision(model):
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits.float().cpu()


def measure_rounding(model: Any, run: Callable[[], Tensor], expected: Tensor) -> float:
    """Return the difference that rounding explains between two computations by a model, as by different kernels.

    One bit in an early layer changes the rounding in all later ones. The error grows with depth and weights: in 16 bits
    it was 2 to 15 ``eps`` of the largest output for 32 to 80 layers. It is therefore measured: twice the change after
    rounding errors of alternating sign in the input embeddings; 0 if that overflows, which would excuse any difference.

    Args:
        model: Model, with or without a PEFT wrapper.
        run: Computes outputs of any shape with it.
        expected: Its result.

    Source: ``tests/models/test_inference.py``.
    """

    def round_embeddings(_module: nn.Module, _inputs: Any, states: Tensor) -> Tensor:
        signs = 1 - torch.arange(states.shape[-1], device=states.device) % 2 * 2
        # Not ``states * (1 + ...)``: in float32, 1 plus half an ``eps`` rounds to 1.
        return states + states * signs * (find_rounding_error(states) / 2)

    inner = unwrap_adapter(extract_model_from_parallel(model))
    with inner.get_input_embeddings().register_forward_hook(round_embeddings):
        change = float((run() - expected).abs().max())
    return 2 * change if math.isfinite(change) else 0.0


def find_logit_shift(
    model: Any, expected: Tensor, ids: Tensor | None = None, *, rounding: float | None = None
) -> float | None:
    """Return the largest change of a logit relative to the largest logit; ``None`` if rounding explains it.

    Args:
        model: Model, as for ``compute_probe_logits``.
        expected: Its expected logits.
        ids: As for ``compute_probe_logits``.
        rounding: Difference that rounding explains; ``None``: ``measure_rounding`` of this model.
    """
    compute = functools.partial(compute_probe_logits, model, ids)
    logits, scale = compute(), expected.abs().max().item()
    shift = (logits - expected).abs().max().item()
    rounding = measure_rounding(model, compute, logits) if rounding is None else rounding
    return None if shift <= max(1e-4 * scale, rounding) else shift / scale


def find_rounding_error(states: Tensor) -> float:
    """Return the relative rounding error of matrix products that gave ``states``, autocast included.

    Args:
        states: Floating-point tensor of any shape, in the autocast context in which it was computed.

    Source: ``tests/models/test_inference.py``.
    """
    kind = states.device.type
    dtypes = {states.dtype, torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else {states.dtype}
    return max(torch.finfo(find_factor_dtype(dtype)).eps for dtype in dtypes)


def find_factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype with the rounding error of the factors of matrix products in ``dtype``; ``float16`` for TF32."""
    # TF32 has a 10-bit fraction, as float16. Read from torch: environment variables and libraries can enable it.
    is_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if is_tf32 else dtype


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities of a model to 0, in dropout modules and attributes, and the noise of routers.

    Source: ``trl.trainer.utils.disable_dropout_in_model``, which omits attributes such as ``attention_dropout``;
    ``tests/models/test_inference.py``.
    """
    # Of Mixtral and MiniMax, Phi, DBRX. Not Phi's ``router_jitter_noise``, which selects its experts in evaluation too.
    noise = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or name in noise) and isinstance(value, float):
                setattr(module, name, 0.0)
        if hasattr(module, "router_jitter_noise"):
            # Phi's router samples experts in training mode, whatever its noise.
            module.register_forward_pre_hook(_set_evaluation)


def _set_evaluation(module: nn.Module, _inputs: Any) -> None:
    module.eval()


def unwrap_adapter(model: Any) -> Any:
    """Return the model inside a PEFT wrapper, with its adapter layers; other models are returned unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs and outputs.

    Under FSDP2 with CPU offload, weights are on the host, and their device mesh gives the device of computation.

    Source: torch ``CPUOffloadPolicy``; ``tests/models/test_inference.py``.
    """
    weight = next(model.parameters())
    if not isinstance(weight, DTensor) or weight.device_mesh.device_type == weight.device.type:
        return weight.device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


@contextmanager
def inputs_moved_to_device(model: Any) -> Iterator[None]:
    """Context in which a model with offloaded weights moves its inputs to its compute device.

    ``generate`` moves inputs to the device of the weights, and FSDP2 moves inputs of the outermost call only, which is
    ``generate`` itself.

    Args:
        model: Model, with or without a PEFT wrapper; without offloading there is no effect.

    Source: ``tests/distributed/test_simulated_device.py``.
    """
    device = find_device(model)
    if model.device == device:
        yield
        return

    def move_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, device), send_to_device(kwargs, device)

    with unwrap_adapter(model).register_forward_pre_hook(move_inputs, prepend=True, with_kwargs=True):
        yield


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of an object have other values; those that it did not have itself are removed."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    try:
        own.update(values)
        yield
    finally:
        for name in values:
            own.pop(name, None)  # It would hide the attribute of the class, such as a method.
        own.update(before)


def save_random_states() -> Callable[[], None]:
    """Save the random states of Python, numpy, torch and every CUDA device; return the function that restores them."""
    # The global generator of numpy, which data collators and libraries use.
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # Reading the states would initialise CUDA, which fails in forked workers.
    cuda_states = torch.cuda.get_rng_state_all() if is_used else []

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state_all(cuda_states)

    return restore


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore afterwards the random states of Python, numpy, torch and every CUDA device."""
    with ExitStack() as stack:
        stack.callback(save_random_states())
        yield


@contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Context of ``evaluating`` that also restores random states (``preserve_random_states``).

    Layers that are compiled for training run eagerly: they would be compiled again for each new shape, and training for
    dynamic shapes.

    Source: ``tests/models/test_inference.py``.
    """
    with preserve_random_states(), evaluating(model), torch.compiler.set_stance("force_eager"):
        yield

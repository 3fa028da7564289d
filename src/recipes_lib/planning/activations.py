"""What passes of a model keep in memory, counted on tensors without memory by the rules of a GPU."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from recipes_lib.models.inference import unwrap_adapter

FLOAT32_ON_CUDA: Final = frozenset(
    (
        *("cosine_similarity", "cross_entropy", "cumprod", "cumsum", "exp", "expm1", "group_norm", "kl_div", "l1_loss"),
        *("layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "mse_loss", "nll_loss", "norm", "pow", "prod"),
        *("reciprocal", "rsqrt", "smooth_l1_loss", "softmax", "softmin", "softplus", "sum"),
    )
)
"""Functions that autocast runs in ``float32`` on CUDA, of which it leaves most in 16 bits on a CPU.

Source: PyTorch, "CUDA Ops that can autocast to float32"; ``tests/planning/test_activations.py`` asks torch itself.
"""


class AutocastAsOnCuda(TorchFunctionMode):
    """Runs the functions of ``FLOAT32_ON_CUDA`` in ``float32`` under a CPU's autocast.

    Of fake tensors on ``cuda`` a torch without CUDA builds no graph: it ends the process.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with 16-bit tensors in 32 bits where CUDA would."""
        given: Any = (args, kwargs or {})
        if getattr(func, "__name__", "").strip("_") in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            half = (torch.bfloat16, torch.float16)
            given = tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in half else tensor, given)
        return func(*given[0], **given[1])


@contextmanager
def on_fakes(model: nn.Module, *, is_half: bool) -> Iterator[None]:
    """Let a model compute on tensors without memory, in 16 bits as on CUDA if ``is_half``."""
    # On a device of its own kind, autocast would not act.
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
        AutocastAsOnCuda(),
    ):
        # PEFT asks where a weight lies, to tell shared ones; the answer is used for nothing here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        model.to_empty(device="cpu")
        yield


def count_cache(policy: Any, length: int) -> int:
    """Count the bytes of keys and values of a row of ``length`` tokens, by whatever the model caches."""
    with torch.no_grad():
        output = unwrap_adapter(policy).base_model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=True)
    held = (value for layer in output.past_key_values.layers for value in vars(layer).values())
    return count_bytes(value for value in held if isinstance(value, Tensor))


class Activations(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass, parameters apart.

    Attributes:
        total: All of them.
        recomputing: With activation checkpointing: the inputs of all layers, and the activations of one.
        largest_layer: Of one layer.
    """

    total: int
    recomputing: int
    largest_layer: int


class _Kept:
    """A tensor that the backward pass needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def count_activations(model: Any, num_rows: int, length: int, num_predicted: int) -> Activations:
    """Count what the loss of a model keeps for its backward pass.

    Args:
        model: With a loss head; it is put into training mode.
        num_rows: Rows of the micro-batch.
        length: Tokens of each.
        num_predicted: Those of them that are predicted.
    """
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    # What is dropped in the forward pass already, as nothing that is learnt needs it, does not count.
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
    layers: list[tuple[int, int]] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor)
        kept.add(holder)
        return holder

    def count() -> int:
        storages = (holder.tensor.untyped_storage() for holder in kept)
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(size for storage, size in sizes.items() if storage not in own)

    def enter(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        layers.append((count(), inputs[0].numel() * inputs[0].element_size()))

    def leave(*_: Any) -> None:
        before, size = layers[-1]
        layers[-1] = (count() - before, size)

    model.train()
    for layer in list_layers(model):
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = model(
            input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
            predictors=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            targets=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            with_statistics=True,
            token_logps=True,
        )
    total, in_layers = count(), [size for size, _ in layers]
    assert output.logps.requires_grad  # Until here it keeps them.
    inputs = sum(size for _, size in layers)
    return Activations(total, total - sum(in_layers) + inputs + max(in_layers), max(in_layers))


def count_bytes(held: nn.Module | Iterable[Tensor]) -> int:
    """Count the bytes of tensors, or of a module's parameters and buffers, each that is shared once."""
    tensors = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def list_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose activations can be recomputed, in the order of the model."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]

"""Activation memory of models, counted on fake tensors with the rules of a GPU."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.models.activation_checkpointing import is_product

FLOAT32_ON_CUDA: Final = frozenset(
    (
        *("cosine_similarity", "cross_entropy", "cumprod", "cumsum", "exp", "expm1", "group_norm", "kl_div", "l1_loss"),
        *("layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "mse_loss", "nll_loss", "norm", "pow", "prod"),
        *("reciprocal", "rsqrt", "smooth_l1_loss", "softmax", "softmin", "softplus", "sum"),
    )
)
"""Functions that autocast runs in ``float32`` on CUDA; on a CPU it runs most of them in 16 bits.

Source: PyTorch, "CUDA Ops that can autocast to float32"; compared with torch in
``tests/planning/test_activations.py``.
"""


CAUSAL: Final = "causal_without_mask"
"""sdpa without a mask, as on GPUs: of fake tensors, whose values are unknown, transformers builds a mask of T x T."""


def _attend(
    module: Any, query: Any, key: Any, value: Any, *mask: Any, softcap: Any = None, dropout: Any = 0, **options: Any
) -> tuple[Tensor, None]:
    """Attention that saves what sdpa saves, and so do kernels with a cap on the logits, which sdpa lacks.

    On a CPU, sdpa would save T x T probabilities with dropout, whose seed GPUs save instead, and with values narrower
    than keys (latent attention, MLA), which GPUs pad.
    """
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = functional.pad(value, (0, key.shape[-1] - width))
    return sdpa_attention_forward(module, query, key, value, *mask, **options)[0][..., :width], None


AttentionInterface.register(CAUSAL, _attend)


class AutocastAsOnCuda(TorchFunctionMode):
    """Run the functions of ``FLOAT32_ON_CUDA`` in ``float32`` under CPU autocast.

    Fake tensors on ``cuda`` are no alternative: a torch without CUDA crashes when it builds their autograd graph.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with 16-bit tensors cast to ``float32`` if autocast on CUDA would cast them."""
        given: Any = (args, kwargs or {})
        name = getattr(func, "__name__", "").strip("_")
        # The product of experts has kernels for every dtype, but is defined for fake tensors in bfloat16 alone. That
        # with the first expert has the same shape, and saves as much.
        if name == "grouped_mm" and args[0].dtype != torch.bfloat16:
            with torch.autocast("cpu", enabled=False):  # Which does not cast the product of experts.
                return args[0] @ args[1][0]
        if name in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            half = (torch.bfloat16, torch.float16)
            given = tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in half else tensor, given)
        return func(*given[0], **given[1])


@contextmanager
def on_fakes(model: nn.Module, *, is_half: bool) -> Iterator[None]:
    """Context in which a model computes on fake tensors, with 16-bit autocast as on CUDA if ``is_half``."""
    # On the fake CPU: autocast has no effect on a custom device.
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
        AutocastAsOnCuda(),
    ):
        # PEFT queries the storage of a weight to find shared ones; the result is unused here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Not `to_empty`, which converts each tensor to a fake one first.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # type: ignore[no-untyped-call]
        yield


def count_cache(model: Any, length: int) -> int:
    """Return the bytes of the KV cache of a row of ``length`` tokens, and of the states of recurrent layers."""
    with torch.no_grad():
        output = model.base_model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=True)
    # Named `past_key_values` in transformers 5.23, `cache` in later versions, and `cache_params` in Mamba.
    cache = next(output[name] for name in ALL_CACHE_NAMES if name in output)
    # Recurrent layers hold their states in dictionaries.
    held = tree_leaves([vars(layer) for layer in cache.layers])
    return count_bytes(value for value in held if isinstance(value, Tensor))


class Checkpointing(NamedTuple):
    """Layers that are recomputed in the backward pass, and which of their activations are saved.

    Attributes:
        every: Period of recomputed layers: those whose index is a multiple; 0 for none.
        keeps_products: Whether outputs of matrix products and attention are saved (``save_matmuls``).
        offloads: Whether inputs of recomputed layers are offloaded to host memory.
    """

    every: int = 0
    keeps_products: bool = False
    offloads: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Checkpointing:
        """Return the layers by ``activation_checkpointing_kwargs``; ``None`` for no activation checkpointing."""
        if options is None:
            return cls()
        return cls(options.get("every_n_layers") or 1, bool(options.get("save_matmuls")), bool(options.get("offload")))


def read_checkpointing(config: RecipeConfig) -> Checkpointing:
    """Return the activation checkpointing of a run, from ``activation_checkpointing`` (not ``auto``) and its kwargs."""
    options = config.training.get("activation_checkpointing_kwargs") or {}
    return Checkpointing.of(options if config.read("activation_checkpointing") else None)


MODES: Final[Mapping[str, Mapping[str, Any] | None]] = {
    "none": None,
    "save_matmuls": {"save_matmuls": True},
    "every 2nd layer": {"every_n_layers": 2},
    "every layer": {},
}
"""Kinds of activation checkpointing by name, the fastest first: their ``activation_checkpointing_kwargs``."""
AUTO: Final = "auto"


def list_keys(mode: str) -> dict[str, Any]:
    """Return the keys of a recipe for one of ``MODES``."""
    options = MODES[mode]
    return {"activation_checkpointing": options is not None, "activation_checkpointing_kwargs": options or None}


class LayerBytes(NamedTuple):
    """Bytes saved by the forward pass of a layer for its backward pass.

    Attributes:
        total: All saved tensors, without checkpointing.
        inputs: Input of the layer.
        products: Outputs of its matrix products and attention.
    """

    total: int
    inputs: int
    products: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes saved by a forward pass for the backward pass, without parameters.

    Attributes:
        outside: Bytes saved outside of layers.
        layers: Bytes saved by each layer.
        num_operations: Number of operations of the pass.
    """

    outside: int
    layers: tuple[LayerBytes, ...]
    num_operations: int = field(default=0, compare=False)

    def extend(self, kinds: Sequence[object]) -> Activations:
        """Return the activations of a model with layers of these kinds, further ones as the last of their kind."""
        last = dict(zip(kinds, self.layers, strict=False))
        return replace(self, layers=(*self.layers, *(last[kind] for kind in kinds[len(self.layers) :])))

    def extrapolate(self, larger: Activations, steps: float) -> Activations:
        """Extrapolate linearly in rows or tokens: add ``steps`` times the difference of ``larger`` to this."""

        def extend(one: int, two: int) -> int:
            return round(one + steps * (two - one))

        layers = (LayerBytes(*map(extend, *pair)) for pair in zip(self.layers, larger.layers, strict=True))
        return replace(self, outside=extend(self.outside, larger.outside), layers=tuple(layers))

    def count(self, checkpointing: Checkpointing, in_flight: float = 1) -> int:
        """Return the peak bytes of a backward pass, in which later layers are freed before one is recomputed.

        Args:
            checkpointing: Recomputed layers.
            in_flight: Micro-batches whose activations are held, one of which is in its backward pass.
        """
        held, peak = self.outside, 0
        for index, layer in enumerate(self.layers):
            if not checkpointing.every or index % checkpointing.every:
                held += layer.total
                continue
            held += (0 if checkpointing.offloads else layer.inputs) + checkpointing.keeps_products * layer.products
            # While a layer is recomputed, its saved products are reused, and an offloaded input is on the device again.
            rest = layer.total - (layer.products if checkpointing.keeps_products else 0)
            peak = max(peak, held + rest + (layer.inputs if checkpointing.offloads else 0))
        return round((in_flight - 1) * held) + max(held, peak)


class _Kept:
    """A tensor saved for the backward pass, with address and bytes of its storage.

    These are read once, since each reading is an operation on a fake tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, storage = tensor, tensor.untyped_storage()
        self.address, self.num_bytes = storage._cdata, storage.nbytes()


def count_activations(model: Any, num_rows: int, length: int, num_predicted: int) -> Activations:
    """Count the activations saved by the loss of a model for its backward pass.

    Args:
        model: Model with a loss head; switched to training mode.
        num_rows: Rows of the micro-batch.
        length: Tokens per row.
        num_predicted: Predicted tokens per row.
    """
    watched = _Products(model)
    # Weak references: tensors that are freed during the forward pass, because no gradient needs them, do not count.
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
    before: list[int] = []
    layers: list[LayerBytes] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor)
        kept.add(holder)
        return holder

    def count() -> int:
        sizes = {holder.address: holder.num_bytes for holder in kept}
        return sum(size for address, size in sizes.items() if address not in watched.weights)

    def enter(_layer: nn.Module, _inputs: tuple[Any, ...]) -> None:
        before.append(count())
        watched.num_bytes = 0

    def leave(_layer: nn.Module, inputs: tuple[Any, ...], _outputs: Any) -> None:
        layers.append(LayerBytes(count() - before.pop(), inputs[0].nbytes, watched.num_bytes))

    model.train()
    for layer in list_layers(model):
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    hooks = saved_tensors_hooks(pack, lambda holder: holder.tensor)
    with _fusing_recurrences(model), torch.enable_grad(), hooks, watched:
        output = model(
            input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
            predictors=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            targets=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            with_statistics=True,
            token_logps=True,
            # One chunk saves what many save, and takes no time: the tensors are fake.
            chunk_size=num_rows * num_predicted,
        )
    total = count()
    assert output.logps.requires_grad  # Keeps the graph and its saved tensors alive until they are counted.
    return Activations(total - sum(layer.total for layer in layers), tuple(layers), watched.num_operations)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of matrix products and attention that ``save_matmuls`` saves, and identifies weights.

    Attributes:
        num_bytes: Bytes of products since it was last set to 0.
        num_operations: Number of operations.
        weights: Storages of parameters, and of the copies of trained ones, which autocast holds itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.num_operations = 0
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._trained = {one.untyped_storage()._cdata for one in model.parameters() if one.requires_grad}
        # Kept alive, so that no other storage gets the same address.
        self._copies: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # Most calls: of a fake tensor, each operation asks several times.
            return args[0].fake_device
        self.num_operations += 1
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._trained:
            self._copies.append(returned)
            self.weights.add(returned.untyped_storage()._cdata)
        if is_product(func):
            found = returned if isinstance(returned, tuple) else (returned,)
            self.num_bytes += sum(tensor.nbytes for tensor in found if isinstance(tensor, Tensor))
        return returned


class _Fused(torch.autograd.Function):
    """Saves its inputs, and returns an empty tensor like the first."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(first, *others)
        return torch.empty_like(first)


_save: Any = _Fused.apply


def fuse_layers(model: nn.Module) -> None:
    """Replace norms and gated MLPs by versions that save what Liger's kernels would; their outputs are empty.

    Compiled layers save at most as much: Inductor recomputes elementwise operations in the backward pass.

    Source: Hsu et al. 2024 (Liger Kernel), section 3.2; measured memory in docs/results_gpu.md.
    """

    def fuse(module: Any) -> Callable[[Tensor], Tensor] | None:
        if type(module).__name__.endswith("RMSNorm"):
            # Its input, and one number per token.
            return lambda hidden: _save(
                hidden, *module.parameters(), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
            )
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            # Both factors of SwiGLU or GeGLU, but not the activation.
            return lambda hidden: module.down_proj(_save(module.gate_proj(hidden), module.up_proj(hidden)))
        return None

    for module in model.modules():
        if (forward := fuse(module)) is not None:
            module.forward = forward


_PACKAGES: Final = {"causal-conv1d": "causal_conv1d", "flash-linear-attention": "fla", "mamba-ssm": "mamba_ssm"}
"""Packages of kernels by distribution -> name by which they are imported."""
_RECURRENCES: Final[Mapping[str, tuple[str, int]]] = {
    "causal_conv1d_fn": ("causal-conv1d", 0),
    "chunk_kimi_delta_attention": ("flash-linear-attention", 2),
    "torch_chunk_gated_delta_rule": ("flash-linear-attention", 2),
    "mamba2_chunk_scan": ("mamba-ssm", 0),
    "mamba_selective_scan": ("mamba-ssm", 0),
}
"""Convolutions, linear attention and scans by their names in modules of transformers -> package of their kernel, and
position of the argument that has the shape and dtype of the output: hidden states, or values."""


def list_recurrences(model: nn.Module) -> list[tuple[ModuleType, str, str]]:
    """Return the recurrences of a model that are counted as kernels: module of transformers, name and distribution.

    On a machine with a GPU, only those of installed packages: without them, the reference runs.
    """
    return [
        (module, name, package)
        for module in {sys.modules[type(part).__module__] for part in model.modules()}
        for name, (package, _) in _RECURRENCES.items()
        if hasattr(module, name) and (not torch.cuda.is_available() or find_spec(_PACKAGES[package]))
    ]


def _run_kernel(like: int, *args: Any, **kwargs: Any) -> Any:
    output = _save(args[like], *(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
    # Linear attention, whose output is like its values, also returns its final state.
    return (output, None) if like else output


@contextmanager
def _fusing_recurrences(model: nn.Module) -> Iterator[None]:
    """Context in which recurrences save their inputs, as their kernels do; their outputs are empty.

    The references save the state of every token, or products of all pairs of tokens in a chunk for each channel: tens
    of times as much. Kernels recompute these in the backward pass; what they save besides, such as sums of gates and 64
    to 128 numbers per token and head, is not counted.

    Source: what ``ChunkKDAFunction`` (flash-linear-attention) and ``MambaChunkScanCombinedFn`` (mamba-ssm) save.
    """
    with ExitStack() as stack:
        for module, name, _ in list_recurrences(model):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, partial(_run_kernel, _RECURRENCES[name][1]))
        yield


def count_bytes(held: nn.Module | Iterable[Tensor]) -> int:
    """Return the bytes of tensors, or of a module's parameters and buffers, shared ones counted once."""
    tensors = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def list_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that support activation checkpointing, in the order of the model, without layers in layers."""
    found = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    # A hybrid layer of Zamba contains a Mamba layer.
    nested = {inner for outer in found for inner in outer.modules() if inner is not outer}
    return [layer for layer in found if layer not in nested]

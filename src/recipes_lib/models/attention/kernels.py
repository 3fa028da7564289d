"""Choice of the attention kernel, and verification that packed documents are isolated."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, TrainingArguments
from transformers.utils.import_utils import (
    KERNELS_MIN_VERSION,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
    is_kernels_available,
)

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, Problem, read_last_line
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.score_head import HEAD
from recipes_lib.models.inference import (
    evaluating,
    find_device,
    find_rounding_error,
    kernel_precision,
    measure_rounding,
    unwrap_adapter,
)
from recipes_lib.models.parallel.context_parallel import (
    ContextParallelGroup,
    register_context_parallel,
    verify_context_parallel,
)
from recipes_lib.models.structure import find_head_dims, has_attention_dropout, is_replaceable_sdpa, list_layer_configs

Layout = Literal["rows", "flat"]
"""``rows``: documents in the rows of a ``(B, L)`` batch, separated by restarting positions. ``flat``: all documents in
one row, with ``cu_seq_lens_q``, ``cu_seq_lens_k`` (``int32``), ``max_length_q`` and ``max_length_k``."""

LAYOUTS: Final[dict[str, Layout]] = {
    "sdpa": "rows",
    "eager": "rows",
    "flash_attention_2": "flat",
    "flash_attention_3": "flat",
    "flash_attention_4": "flat",
    "kernels-community/flash-attn2": "flat",
    "kernels-community/flash-attn3": "flat",
    "kernels-community/flash-attn4": "flat",
    "kernels-community/vllm-flash-attn3": "flat",
    "varlen": "flat",
}
"""``attn_implementation`` -> batch layout in which it isolates documents. Kernels of ``kernels-community`` come from
the Hub, at the versions of transformers' ``FLASH_ATTN_KERNEL_VERSIONS``."""

ABSENT: Final = "is not installed"
"""Beginning of the refusal of a kernel that only lacks its package."""
_HUB: Final = "kernels-community/"
FLASH_IS_INSTALLED: Final = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
    **dict.fromkeys((name for name in LAYOUTS if name.startswith(_HUB)), is_kernels_available),
}
_MODULES: Final = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Modules of the kernels that are chosen by default."""
FASTEST: Final = ("flash_attention_3", "flash_attention_2", "varlen")
"""Kernels for packed rows on CUDA, the fastest first. Binaries from the Hub and FlashAttention 4, whose versions are
betas, run only if a recipe names them."""
_MAX_HEAD_DIM: Final = 256
"""Largest head dimension of FlashAttention."""
ISOLATING_LAYERS: Final = {"full_attention", "sliding_attention"}

_MASKS: Final = re.compile(r"(?:causal_mask\w*|mask_function)\(\s*config=[^)]*|mask_kwargs = \{[^}]*")
"""Arguments of the causal masks in the code of a model (transformers 5.23 and 5.24)."""
_DROPPING_BOUNDS: Final = ("nemotron",)
"""Model types whose layers do not pass the bounds of documents on to the kernel (transformers 5.23)."""

_SEPARATE: Final = "set packing: false (in pretraining, cross_document_attention: true)"
_OTHERWISE: Final = f"{_SEPARATE}, or another attn_implementation"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Attention kernel to load the model with, and the batch layout for it."""

    implementation: str
    layout: Layout


def choose_attention(
    config: ModelConfig,
    model_config: PreTrainedConfig,
    args: TrainingArguments,
    *,
    packing: bool,
    flattens: bool = False,
    context: ContextParallelGroup | None = None,
) -> AttentionChoice:
    """Choose the kernel of a run: ``choose_kernel`` for its model, device and precision.

    Args:
        config: Requested kernel and dtype.
        model_config: Configuration of the model.
        args: Training arguments, for device and precision.
        packing: Whether several documents share a row.
        flattens: Whether the collator can flatten rows of one document (``choose_kernel``).
        context: Context-parallel group, which needs its own kernel.

    Raises:
        ConfigError: As ``choose_kernel`` and ``verify_context_parallel``; or context parallelism on GPUs in float32.
    """
    # `auto` is no attribute of torch.
    compute_dtype = torch.float16 if args.fp16 else getattr(torch, config.dtype, torch.float32)
    if args.bf16 or args.mixed_precision == "fp8":
        compute_dtype = torch.bfloat16
    if context is not None:
        if args.device.type == "cuda" and compute_dtype == torch.float32:
            found = "on GPUs, context parallelism needs bf16 or fp16"
            raise ConfigError(Problem("launch", found, "use a launch file with `mixed_precision: bf16`"))
        verify_context_parallel(model_config, context.size, by_heads=context.by_heads)
        register_context_parallel(context)
        return AttentionChoice("context", "rows")
    return choose_kernel(
        model_config,
        config.attn_implementation,
        device=args.device,
        compute_dtype=compute_dtype,
        packing=packing,
        flattens=flattens,
    )


def choose_kernel(
    config: PreTrainedConfig,
    requested: str | None = None,
    *,
    device: torch.device,
    compute_dtype: torch.dtype = torch.float32,
    packing: bool = False,
    flattens: bool = False,
) -> AttentionChoice:
    """Choose the attention kernel: the requested one if it is supported, otherwise the fastest supported one.

    Args:
        config: Configuration of the model.
        requested: ``attn_implementation`` of the recipe; ``None`` for the default.
        device: Device of the model.
        compute_dtype: Dtype of matrix products.
        packing: Whether several documents share a row.
        flattens: Whether the collator flattens rows of one document for kernels with the layout ``flat``, which avoids
            padding and the search for documents in the positions, which synchronises with the host.

    Raises:
        ConfigError: The kernel is unknown, not installed or unsupported for this model, or this model does not isolate
            packed documents.
    """
    config = config.get_text_config()
    mixing = find_packing_problems(config)
    problems = mixing if packing else []
    # Other kernels are faster than sdpa only for packed rows on CUDA. FlashAttention 3 needs Hopper; the flash-attn
    # package and torch's variable-length attention both are FlashAttention 2.
    is_packed = packing or (flattens and not mixing)
    fast = FASTEST if is_packed and device.type == "cuda" else ()
    candidates = [requested] if requested else [*fast, "sdpa", "eager"]
    reasons = find_refusals(config, device, compute_dtype)
    chosen = next((name for name in candidates if name in reasons and reasons[name] is None), None)
    if chosen is None:
        usable = ", ".join(name for name, reason in reasons.items() if reason is None)
        problems += [
            Problem("attn_implementation", f"{name} {reasons.get(name, 'is not a known kernel')}", f"use {usable}")
            for name in candidates
        ]
    elif packing and not mixing and LAYOUTS[chosen] == "rows" and _ignores_positions(config):
        found = f"{chosen} cannot separate documents: the mask of {config.model_type} models ignores position_ids"
        remedy = f"{_SEPARATE}, or attn_implementation to a kernel without a mask"
        problems.append(Problem("packing", found, remedy))
    if chosen is None or problems:
        raise ConfigError(*problems)
    if chosen == "varlen":
        register_varlen()
    return AttentionChoice(chosen, LAYOUTS[chosen])


def find_refusals(config: PreTrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> dict[str, str | None]:
    """Return for each kernel the reason why it cannot be used, as a clause after its name; ``None`` if it can."""
    return {name: _refusal(name, config, device, compute_dtype) for name in LAYOUTS}


def explain_choice(
    implementation: str, config: PreTrainedConfig, device: torch.device, compute_dtype: torch.dtype
) -> str:
    """Return the kernel name, and on CUDA why faster kernels for packed rows are not used.

    Args:
        implementation: Kernel of the model.
        config: Configuration of the model.
        device: Device of the model.
        compute_dtype: Dtype of matrix products.
    """
    names = [] if device.type != "cuda" or implementation.startswith(_HUB) else list(FASTEST)
    faster = names[: names.index(implementation)] if implementation in names else names
    refusals = find_refusals(config.get_text_config(), device, compute_dtype)
    reasons = [f"{name} {refusals[name]}" for name in faster if refusals[name]]
    return f"{implementation} ({'; '.join(reasons)})" if reasons else implementation


def find_packing_problems(config: PreTrainedConfig) -> list[Problem]:
    """Return the reasons why packed documents would not be isolated, according to the configuration."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    mixing = sorted(set(getattr(config, "layer_types", None) or ()) - ISOLATING_LAYERS)
    if getattr(model_class, "_is_stateful", False) or mixing:
        reason = f"has {', '.join(mixing) or 'recurrent'} layers, which are not known to isolate documents"
    # Models with code from the Hub are tested by ``verify_isolation``.
    elif getattr(config, "alibi", False) or (
        model_class is not None and "position_ids" not in inspect.signature(model_class.forward).parameters
    ):
        reason = "takes no position_ids, so that documents cannot be separated"
    else:
        return []
    return [Problem("packing", f"a {config.model_type} model {reason}", _SEPARATE)]


def _ignores_positions(config: PreTrainedConfig) -> bool:
    """Return whether masks are built without ``position_ids``, as of GPT-OSS; ``verify_isolation`` finds others."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    masks = _MASKS.findall(inspect.getsource(sys.modules[model_class.__module__])) if model_class else []
    return bool(masks) and not any("position_ids" in mask for mask in masks)


def _refusal(name: str, config: PreTrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Return why this kernel cannot be used here, or ``None``."""
    is_cuda, is_flash, is_varlen = device.type == "cuda", name in FLASH_IS_INSTALLED, name == "varlen"
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    needs_half = is_flash or (is_varlen and is_cuda)
    # FlashAttention 2 is for Ampere and later, FlashAttention 3 for Hopper only, FlashAttention 4 for Hopper and later.
    is_for_hopper, is_newer = name.endswith("3"), name.endswith(("3", "4"))
    least = (9, 0) if is_newer else (8, 0)
    needed = f"{least[0]}.0" if is_for_hopper else f"{least[0]}.0 or later"
    # Without a GPU, as when planning a launch, the capability is assumed to suffice.
    capability = torch.cuda.get_device_capability(device) if is_cuda and torch.cuda.is_available() else (9, 0)
    is_capable = capability[0] == 9 if is_for_hopper else capability >= least
    layers = [layer for layer in list_layer_configs(config) if getattr(layer, "num_attention_heads", None)]
    head_dim = max((dim for layer in layers for dim in find_head_dims(layer)), default=0)
    package = f"{ABSENT}: it needs the package kernels, {KERNELS_MIN_VERSION} or later"
    reasons = {
        "runs on CUDA devices only": is_flash and not is_cuda,
        f"needs a GPU of compute capability {needed}": needs_half and not is_capable,
        f"has head dimensions up to {_MAX_HEAD_DIM}, and this model has {head_dim}": needs_half
        and head_dim > _MAX_HEAD_DIM,
        "needs bf16 or fp16": needs_half and compute_dtype not in (torch.bfloat16, torch.float16),
        f"is not supported for {config.model_type} models by transformers": not _is_supported(name, config),
        "cannot cap attention logits, which this model does": has_softcap and name in ("sdpa", "varlen"),
        "has no attention dropout, which this model's configuration sets": (is_varlen or is_newer)
        and has_attention_dropout(config),
        # Last: without another reason, a machine with the package can use it.
        package if name.startswith(_HUB) else ABSENT: is_flash and not FLASH_IS_INSTALLED[name](),
    }
    refusal = next((reason for reason, applies in reasons.items() if applies), None)
    return refusal or (_find_fault(_MODULES[name]) if name in _MODULES else None)


@cache
def _find_fault(module: str) -> str | None:
    """Return why an installed module cannot be imported: binaries of another version of torch lack symbols."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == module):
            return f"cannot be imported ({read_last_line(error)})"
    return None


def _is_supported(name: str, config: PreTrainedConfig) -> bool:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return name != "varlen"
    # transformers would replace another FlashAttention than these by the first of them, from the Hub.
    flash = model_class._compatible_flash_implementations or LAYOUTS
    answers: dict[str, bool] = {
        "eager": True,
        "sdpa": model_class._supports_sdpa,
        "varlen": is_replaceable_sdpa(config) and config.model_type not in _DROPPING_BOUNDS,
    }
    return answers.get(name, bool(model_class._supports_flash_attn) and name in flash)


def verify_isolation(model: Any, layout: Layout) -> None:
    """Verify by forward passes that two packed documents do not attend to each other.

    Each must have the same logits as second in the row as first, where causal attention reaches no other, and changing
    one must not change those of the other. For reward models, hidden states are compared, since they have logits at one
    token only. Costs a few forward passes over 16 tokens; with sharded weights, this is a collective that every process
    must enter.

    Args:
        model: Model as it will be trained; mode and random state are restored.
        layout: Layout of its batches.

    Raises:
        ConfigError: The documents are not isolated, or the model fails on a packed batch.

    Source: ``tests/models/attention/test_kernels.py``, for models with and without leaks.
    """
    # Different lengths, so that a swapped or shifted boundary changes results.
    documents = [torch.arange(2, 2 + length, device=find_device(model)) for length in (7, 9)]
    changed = [document + 9 for document in documents]
    try:
        with evaluating(model), kernel_precision(model, is_packed=True):
            together = _run_packed(model, documents, layout)
            # All passes have the same shapes: at others, half precision rounds otherwise, and tokens change experts.
            swapped = _run_packed(model, documents[::-1], layout)[::-1]
            beside_another = [
                _run_packed(model, [documents[0], changed[1]], layout)[0],
                _run_packed(model, [changed[0], documents[1]], layout)[1],
            ]
            rounding = measure_rounding(model, lambda: _run_packed(model, documents, layout)[1], together[1])
            eps = find_rounding_error(together[0])
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(Problem("packing", f"this model fails on a packed batch: {error}", _OTHERWISE)) from error
    scale = max(states.abs().max().item() for states in together)
    if not math.isfinite(scale):
        found = "the model's outputs are not finite: a weight is not, or the dtype overflows"
        raise ConfigError(Problem("model_name_or_path", found, "name an intact model, or write dtype: float32"))
    # Beside a changed document, only mixtures of experts differ by rounding, since the tokens of an expert change.
    for others, allowed in ((swapped, max(1e-4 * scale, rounding)), (beside_another, scale * max(1e-5, 4 * eps))):
        difference = max((one - other).abs().max().item() for one, other in zip(together, others, strict=True))
        if not difference <= allowed:
            outputs = "hidden states" if hasattr(model, HEAD) else "logits"
            found = f"a document does not keep its {outputs} beside another: one moves by {difference:.2g}"
            raise ConfigError(Problem("packing", found, _OTHERWISE))


def _run_packed(model: Any, documents: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Return the logits of each document in one packed row, ``(T, V)``; for a reward model hidden states ``(T, D)``."""
    lengths = [len(document) for document in documents]
    device = documents[0].device
    inputs: dict[str, Any] = {
        "input_ids": torch.cat(list(documents))[None] % model.config.get_text_config().vocab_size,
        "position_ids": torch.cat([torch.arange(length, device=device) for length in lengths])[None],
    }
    if layout == "flat":
        bounds = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    # ``output_hidden_states`` would leave a hook in every layer, which breaks the graphs of compiled layers.
    module = unwrap_adapter(model).base_model if hasattr(model, HEAD) else model
    outputs = module(**inputs, use_cache=False)
    states = outputs.last_hidden_state if module is not model else outputs.logits
    return list(torch.split(states[0], lengths))

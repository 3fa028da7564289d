"""Quantisation of base models for adapters to 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from recipes_lib.config.schema import QuantizationConfig
from recipes_lib.errors import Problem, verify_extra

_DEQUANTIZED: Final = ("fp8", "mxfp4")
"""Methods of checkpoints that transformers can load unquantised, such as those of DeepSeek V3 and gpt-oss."""


def build_quantization_config(
    config: QuantizationConfig, compute_dtype: torch.dtype, engine: str
) -> BitsAndBytesConfig | None:
    """Build the quantisation configuration for ``load_causal_lm`` (4 or 8 bits); ``None`` without quantisation.

    FSDP and ZeRO-3 shard floating-point tensors and cast them to the compute dtype, which would destroy packed 4-bit
    codes. The codes are therefore stored in that dtype, so that the cast is the identity and all tensors of a layer
    have one dtype. Without sharding, the storage dtype is ``uint8``.

    Unquantised modules (embeddings, norms, output projection) keep the ``dtype`` of the run, whereas PEFT's
    ``prepare_model_for_kbit_training`` converts them to ``float32``. They are frozen, so that no small updates are
    lost, and norms compute in ``float32`` in any case; for Llama 3 8B, float32 would take 2.1 GB more.

    Args:
        config: Number of bits and quantisation type.
        compute_dtype: Dtype of matrix products.
        engine: Sharding engine, ``FSDP``, ``DEEPSPEED`` or empty, as in ``Launch``.

    Raises:
        ConfigError: bitsandbytes is not installed.

    Source: Dettmers et al. 2023 (QLoRA), section 3; Dettmers et al. 2022 (LLM.int8());
    ``tests/models/test_quantization.py``.
    """
    if not config.is_quantized:
        return None
    key = "load_in_8bit" if config.load_in_8bit else "load_in_4bit"
    verify_extra(key, "gpu", "bitsandbytes")
    if config.load_in_8bit:
        # bitsandbytes warns once per layer and step that inputs are cast to float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if engine else torch.uint8,
    )


def check_quantization(
    name: str, model_config: PreTrainedConfig, requested: QuantizationConfig | BitsAndBytesConfig
) -> Iterator[Problem]:
    """Yield a problem if a checkpoint has other bits than requested, or its architecture cannot be quantised.

    transformers ignores the request and keeps the bits that bitsandbytes has quantised a checkpoint to. Other methods
    need kernels of a GPU, or cannot be trained. Its Mamba multiplies by the weight of ``dt_proj`` itself, unlike Falcon
    Mamba and Jamba (transformers 5.23).

    Args:
        name: Name of the model, for the message.
        model_config: Configuration of its checkpoint.
        requested: Requested number of bits.
    """
    saved = _get_saved(model_config)
    keys = ("load_in_4bit", "load_in_8bit")  # Configurations of other methods do not have them.
    held, wanted = ([key for key in keys if is_set(key)] for is_set in (saved.get, partial(getattr, requested)))
    method = saved.get("quant_method")
    if saved and (held != wanted or not (held or method in _DEQUANTIZED)):
        found = f"the checkpoint of {name} is quantised ({[*held, method][0]})"
        found += f", not to {wanted[0]}" if wanted else ""
        own = f"set {held[0]}: true and use_peft: true, or " if held else ""
        yield Problem([*wanted, "model_name_or_path"][0], found, f"{own}name the model that it was made from")
    elif wanted and model_config.model_type == "mamba":
        yield Problem(wanted[0], "transformers cannot compute with quantised weights of Mamba", "delete the line")


def build_dequantization(model_config: PreTrainedConfig) -> QuantizationConfigMixin | None:
    """Build the configuration with which transformers dequantises a checkpoint; ``None`` for other checkpoints.

    By default it does so on a CPU only, and a GPU would get weights that cannot be trained.
    """
    saved = _get_saved(model_config)
    if saved.get("quant_method") not in _DEQUANTIZED:
        return None
    built: QuantizationConfigMixin = AutoQuantizationConfig.from_dict({**saved, "dequantize": True})
    return built


def _get_saved(model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return the quantisation in a checkpoint's config.json, where those of vision models have it one level below."""
    places = (model_config, model_config.get_text_config())
    return next(filter(None, (getattr(place, "quantization_config", None) for place in places)), {})


def list_quantized(model: Any) -> list[nn.Linear]:
    """Return the layers of an unquantised model that are quantised: all linear ones but the output projection."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def count_stored_bytes(model: Any, config: QuantizationConfig) -> int:
    """Return the bytes of a model's parameters and buffers, after quantisation of its linear layers if there is any.

    4-bit weights have a scale per block of 64 values, in ``float32``, or with nested quantisation in one byte plus one
    ``float32`` per 256 scales; 8-bit weights have a ``float32`` scale per row.

    Args:
        model: Unquantised model, such as one on the meta device.
        config: Number of bits and quantisation type.

    Source: bitsandbytes ``quantize_4bit``, ``int8_vectorwise_quant``; ``tests/models/test_quantization.py``.
    """
    layers = list_quantized(model) if config.is_quantized else []
    quantized = {id(layer.weight) for layer in layers}
    # By id, so that tied tensors count once.
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    rest: int = sum(tensor.nbytes for key, tensor in tensors.items() if key not in quantized)
    if config.load_in_8bit:
        return rest + sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    return rest + sum(round(layer.weight.numel() * (0.5 + count_scale_bytes(config))) for layer in layers)


def find_unquantized(model: Any) -> str | None:
    """Return a caution if experts keep their dtype, as those that transformers stores in one tensor per layer.

    Args:
        model: Model before or after quantisation.
    """
    kept = sum(stack.numel() for name, stack in model.named_parameters() if "expert" in name and stack.dim() == 3)
    figures = f"{kept / 1e6:,.1f} M of {model.num_parameters() / 1e6:,.1f} M parameters"
    return f"bitsandbytes leaves the dtype of experts, {figures}, since they are no linear layers" if kept else None


def count_scale_bytes(config: QuantizationConfig) -> float:
    """Return the bytes of scales per 4-bit weight, which bitsandbytes keeps outside of the parameter."""
    return (1 + 4 / 256) / 64 if config.use_bnb_nested_quant else 4 / 64


def keep_differentiable(model: nn.Module) -> None:
    """Prevent 4-bit layers from repacking their codes on a CPU with AVX512-BF16.

    bitsandbytes repacks them in the first forward pass in evaluation mode, for a kernel without a backward pass. The
    layers below would then silently get incomplete gradients.

    Source: bitsandbytes ``Linear4bit.forward``; ``tests/models/test_quantization.py``.
    """
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False

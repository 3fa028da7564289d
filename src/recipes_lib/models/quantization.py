"""Quantised base models for adapters, in 8 or 4 bits."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from recipes_lib.config.schema import QuantizationConfig
from recipes_lib.errors import ConfigError, Problem


def build_quantization_config(
    config: QuantizationConfig, compute_dtype: torch.dtype, engine: str
) -> BitsAndBytesConfig | None:
    """Build the quantisation configuration for ``load_causal_lm`` (4 or 8 bits); ``None`` without quantisation.

    Sharding needs floating-point tensors and casts them to the compute dtype, which would destroy packed 4-bit codes.
    Therefore the codes are stored in exactly that dtype: the cast does nothing, and all tensors of a layer have one
    dtype. Without sharding they are bytes, which FSDP2 of torch 2.13 would also accept.

    Unquantised modules (embeddings, norms, output projection) keep the run's ``dtype``. PEFT's
    ``prepare_model_for_kbit_training`` would convert them to ``float32``. They are frozen, so no small updates are
    lost, and norms compute in ``float32`` in any case; for Llama 3 8B, float32 would take 2.1 GB more.

    Args:
        config: Which bits.
        compute_dtype: Precision of the matrix products.
        engine: ``FSDP``, ``DEEPSPEED`` or empty, as in ``Launch``.

    Raises:
        ConfigError: bitsandbytes is not installed.

    Source: Dettmers et al. 2023 (QLoRA), section 3; Dettmers et al. 2022 (LLM.int8());
    ``tests/models/test_quantization.py``.
    """
    if not (config.load_in_8bit or config.load_in_4bit):
        return None
    key = "load_in_8bit" if config.load_in_8bit else "load_in_4bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        found = "it needs the package bitsandbytes, which is not installed"
        raise ConfigError(Problem(key, found, "pip install bitsandbytes"))
    if config.load_in_8bit:
        # Otherwise it warns once per layer and step that products are in float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if engine else torch.uint8,
    )


def count_quantized_bytes(model: Any, config: QuantizationConfig) -> int | None:
    """Return the bytes of a model with quantised linear layers except the output projection; ``None``: unquantised.

    4-bit weights have a scale per block of 64, in ``float32``, or in one byte plus one ``float32`` per 256 scales;
    8-bit weights have one scale per row.

    Source: bitsandbytes ``quantize_4bit``, ``int8_vectorwise_quant``; ``tests/models/test_quantization.py``.
    """
    if not (config.load_in_8bit or config.load_in_4bit):
        return None
    head = model.get_output_embeddings()
    layers: list[nn.Linear] = [
        module for module in model.modules() if isinstance(module, nn.Linear) and module is not head
    ]
    kept = {id(layer.weight) for layer in layers}
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    rest: int = sum(tensor.numel() * tensor.element_size() for key, tensor in tensors.items() if key not in kept)
    if config.load_in_8bit:
        return rest + sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    scale = (1 + 4 / 256) / 64 if config.use_bnb_nested_quant else 4 / 64
    return rest + sum(round(layer.weight.numel() * (0.5 + scale)) for layer in layers)


def keep_differentiable(model: nn.Module) -> None:
    """Prevent 4-bit layers from repacking their codes on a CPU with AVX512-BF16.

    bitsandbytes does so in the first forward pass in evaluation mode, for a kernel without a gradient. Layers below
    would then silently get incomplete gradients.

    Source: bitsandbytes ``Linear4bit.forward``; ``tests/models/test_quantization.py``.
    """
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False

"""Quantised base models under an adapter, in 8 or 4 bits."""

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
    """What ``load_causal_lm`` takes to load a quantised model (4 or 8 bits); ``None`` when that is not asked for.

    What shards weights takes floating-point numbers, and casts them to the compute precision on the way, which would
    destroy packed 4-bit codes. So they are stored as numbers of that very precision there: the cast does nothing, and
    all tensors of a layer are alike. Elsewhere they are bytes, as which torch 2.13's FSDP2 would take them, too.

    What is not quantised (embeddings, norms, the output projection) keeps the ``dtype`` of the run. PEFT's
    ``prepare_model_for_kbit_training`` would make it ``float32``; but it is frozen, so no small update can be lost in
    it, norms compute in ``float32`` whatever they are kept in, and Llama 3 8B would take 2.1 GB more.

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
        # It says once a layer and step that products are in float16.
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
    """Count the bytes of a model once its linear layers but the output projection are quantised; ``None``: they stay.

    Four bits have a scale for each block of 64 weights, in ``float32``, or in a byte and one ``float32`` for 256 of
    those; eight bits have one for each row.

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
    """Keep 4-bit layers from repacking their codes on a CPU that has AVX512-BF16.

    bitsandbytes does so in the first forward pass in evaluation mode, for a kernel that has no gradient; from then on
    the layers below would get partial gradients, silently.

    Source: bitsandbytes ``Linear4bit.forward``; ``tests/models/test_quantization.py``.
    """
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False

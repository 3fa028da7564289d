"""Activation checkpointing; selective: outputs of matrix products are saved, everything else is recomputed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from recipes_lib.errors import ConfigError, Problem

_SAVED: Final = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_"),
    *("torch_attn", "flash_attn", "grouped_mm", "_scaled_mm"),
)
"""Substrings of the names of compute-bound operators, whose outputs are saved; all others are memory-bound and
recomputed. Besides torch's products and attention: its variable-length attention, the FlashAttention packages
(``flash_attn_3``) and kernels from the Hub (``_vllm_flash_attn3_`` and a hash), products of experts and in 8 bits."""


def enable_checkpointing(model: Any, options: Mapping[str, Any] | None) -> None:
    """Enable activation checkpointing of a model, with or without an adapter.

    Args:
        model: Model of transformers, changed in place.
        options: ``activation_checkpointing_kwargs``: arguments of ``torch.utils.checkpoint.checkpoint``, and
            ``every_n_layers``, ``offload`` and ``save_matmuls``.

    Raises:
        ConfigError: transformers does not support it for this architecture, such as JetMoE.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5; gradients equal those without checkpointing in
    ``tests/models/test_activation_checkpointing.py``.
    """
    given = {"use_reentrant": False, **(options or {})}
    every_n_layers = given.pop("every_n_layers", 1)
    # On a CPU, activations are in host memory already, and there is none that could be pinned.
    offload = given.pop("offload", False) and torch.accelerator.is_available()
    if given.pop("save_matmuls", False):
        given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose)
    try:
        model.activation_checkpointing_enable(given, every_n_layers=every_n_layers, offload=offload)
    except ValueError as error:
        remedy = "write activation_checkpointing: false"
        raise ConfigError(Problem("activation_checkpointing", str(error), remedy)) from error


def is_product(operator: Any) -> bool:
    """Return whether ``save_matmuls: true`` saves the output of a torch operator."""
    return any(part in operator.name() for part in _SAVED)


def _choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(operator) else CheckpointPolicy.PREFER_RECOMPUTE

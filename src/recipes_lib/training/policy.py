"""The model that a fine-tuning stage trains: loaded, quantised if asked for, under an adapter if asked for."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.models.adapters import add_adapter
from recipes_lib.models.dropout import disable_dropout
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.quantization import build_quantization_config
from recipes_lib.training.arguments import get_compute_dtype
from recipes_lib.training.launch import Launch


def load_policy(config: RecipeConfig, attn_implementation: str, args: TrainingArguments, launch: Launch) -> Any:
    """Load ``config.model`` as it is trained.

    Args:
        config: The run: its model, precision, quantisation and adapter.
        attn_implementation: As the attention was settled.
        args: Precision of the products, seed of a fresh adapter, and whether dropout is off.
        launch: Under FSDP2 quantised weights are stored otherwise.

    Returns:
        A causal language model, or a PEFT model around it.

    Raises:
        ConfigError: As ``load_causal_lm``, ``build_quantization_config`` and ``add_adapter``.
    """
    quantization = build_quantization_config(config.quantization, get_compute_dtype(args), launch.engine)
    model: Any = load_causal_lm(config.model, attn_implementation, quantization)
    if config.adapter.use_peft:
        model = add_adapter(model, config.adapter, seed=args.seed)
    if getattr(args, "disable_dropout", False):
        disable_dropout(model)
    return model

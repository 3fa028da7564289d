"""From a recipe's keys to the arguments object of upstream's trainers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments
from trl import SFTConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.hardware import supports_bf16
from recipes_lib.training.launch import Launch, verify_launch

_PREPARED_DATA: dict[str, Any] = {
    # Rows arrive tokenised, masked and packed; upstream must not touch them again.
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "packing": False,
    "max_length": None,
    "remove_unused_columns": False,
}
_TRUST: dict[str, Any] = {
    # Upstream's default replaces a NaN loss in the log by the running mean while the weights are destroyed.
    "logging_nan_inf_filter": False,
    # One normaliser over all processes and micro-batches, so that how the batch is cut changes nothing.
    "average_tokens_across_devices": True,
}


def resolve_precision(config: RecipeConfig) -> dict[str, Any]:
    """Return ``bf16``, ``fp16`` and ``use_cpu``: what the recipe says, and bf16 where the hardware has it."""
    training = config.training
    bf16 = training.get("bf16")
    if bf16 is None:
        bf16 = not training.get("fp16") and supports_bf16()
    use_cpu = bool(training.get("use_cpu")) or not torch.accelerator.is_available()
    return {"bf16": bf16, "fp16": bool(training.get("fp16")), "use_cpu": use_cpu}


def build_training_arguments(config: RecipeConfig, launch: Launch, *, has_eval: bool) -> SFTConfig:
    """Build the arguments of an SFT run; several processes meet here, in one process group.

    Args:
        config: The recipe.
        launch: How this process was launched.
        has_eval: Whether there is held-out data; without it nothing is evaluated.

    Raises:
        ConfigError: The processes did not become the one run that was launched.
    """
    arguments = {**config.training, **_PREPARED_DATA, **_TRUST, **resolve_precision(config), "disable_tqdm": True}
    # Every parameter takes part in every loss; looking for idle ones would walk the graph once more a step.
    arguments.setdefault("ddp_find_unused_parameters", False)
    if not has_eval:
        arguments |= {"eval_strategy": "no", "eval_on_start": False, "eval_steps": None}
    args = SFTConfig(**arguments)
    verify_launch(launch, args.world_size, args.distributed_state.distributed_type)
    return args


def get_compute_dtype(args: TrainingArguments) -> torch.dtype:
    """Return the precision of the matrix products."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32

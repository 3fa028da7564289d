"""Training arguments: a recipe's keys as the arguments object of transformers' and TRL's trainers."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.training_args import OptimizerNames
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.hardware import supports_bf16
from recipes_lib.training.layouts.launch_environment import Launch, keep_from_accelerate, verify_launch
from recipes_lib.training.optim.compilation import choose_compilation, choose_liger

MIN_CAPABILITY: Final = (8, 9)
"""Ada and Hopper: the first with 8-bit float products."""

_DIVISOR: Final = 16
_OTHERWISE: Final = "use another launch file, such as accelerate_configs/single_gpu.yaml"


def verify_fp8(launched_precision: str) -> None:
    """Raise if accelerate cannot run this fp8 launch, or would silently use another precision.

    Args:
        launched_precision: ``mixed_precision`` of the launch file.

    Raises:
        ConfigError: torchao is not installed.
        ConfigError: The device is no GPU with 8-bit products.

    Source: accelerate ``AcceleratorState``, which falls back to fp16; ``tests/training/trainers/test_arguments.py``.
    """
    if launched_precision != "fp8":
        return
    problems = []
    if importlib.util.find_spec("torchao") is None:
        found = "fp8 needs the package torchao, which is not installed"
        problems.append(Problem("launch", found, "pip install torchao"))
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < MIN_CAPABILITY:
        has = "no GPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
        wanted = ".".join(map(str, MIN_CAPABILITY))
        found = f"fp8 needs a GPU of compute capability {wanted} or higher; here is {has}"
        problems.append(Problem("launch", found, _OTHERWISE))
    if problems:
        raise ConfigError(*problems)


def verify_fp8_layers(model: nn.Module) -> None:
    """Raise if no layer of the model supports fp8.

    Raises:
        ConfigError: No layer but the first and the last is an ``nn.Linear`` whose sizes are multiples of 16.

    Source: accelerate ``filter_first_and_last_linear_layers``; see ``tests/training/trainers/test_arguments.py``.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not any(layer.in_features % _DIVISOR == 0 == layer.out_features % _DIVISOR for layer in linear[1:-1]):
        found = f"fp8 would change nothing: {type(model).__name__} has no inner nn.Linear with sizes in multiples of 16"
        raise ConfigError(Problem("launch", found, f"choose another model_type, or {_OTHERWISE}"))


# Rows arrive tokenised, masked and packed; upstream must not touch them again.
_PREPARED: Final = {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": False, "max_length": None}
_ARGUMENT_CLASSES: Final = {
    "sft": SFTConfig,
    "lora": SFTConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "distill": SFTConfig,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}
_FALLS: Final = re.compile(
    r"(?:^|[/_])(?:\w*loss|nll|kl|\w*divergence|\w*perplexity|bits_per_byte|brier_score|ece|error|[wct]er|r?mse|mae|s?mape"
    r"|unparsable|seconds)$"
)
"""Figures of which less is better; upstream knows of losses only."""
_OF_RECIPE: dict[str, dict[str, Any]] = {
    "sft": _PREPARED,
    "lora": _PREPARED,
    "reward": {"max_length": None},
    "dpo": {"max_length": None},
    "distill": _PREPARED,
    # An evaluation answers each prompt once.
    "rloo": {"num_generations_eval": 1},
    "grpo": {"num_generations_eval": 1},
    # The schedule is the trainer's own, and measured in tokens; so is the length of the run.
    "pretrain": {"lr_scheduler_type": "constant", "warmup_steps": 0},
}
_ALWAYS: dict[str, Any] = {
    "disable_tqdm": True,
    "remove_unused_columns": False,
    # Upstream uploads from within training, and what was not opened again; recipes_lib/publish/publishing.py does it.
    "push_to_hub": False,
    # Upstream's default replaces a NaN loss in the log by the running mean while the weights are destroyed.
    "logging_nan_inf_filter": False,
    # One normaliser over all processes and micro-batches, so that gradient accumulation changes nothing.
    "average_tokens_across_devices": True,
}


def resolve_precision(config: RecipeConfig, launched: str = "no") -> dict[str, Any]:
    """Return ``bf16``, ``fp16`` and ``use_cpu``: what the recipe says, and bf16 where the hardware has it.

    Args:
        config: The recipe.
        launched: ``mixed_precision`` of the launch file; ``fp8`` and ``fp16`` apply unless the recipe sets a
            precision.
    """
    training = config.training
    bf16, fp16 = training.get("bf16"), training.get("fp16")
    if bf16 is None and fp16 is None:
        fp16 = launched == "fp16"
    if bf16 is None:
        bf16 = launched != "fp8" and not fp16 and supports_bf16()
    use_cpu = bool(training.get("use_cpu")) or not torch.accelerator.is_available()
    return {"bf16": bf16, "fp16": bool(fp16), "use_cpu": use_cpu}


def build_training_arguments(
    config: RecipeConfig, launch: Launch, *, has_eval: bool, num_steps: int | None = None
) -> TrainingArguments:
    """Build the arguments of a run; initialises the process group.

    Args:
        config: The recipe.
        launch: How this process was launched.
        has_eval: Whether there is held-out data; without it nothing is evaluated.
        num_steps: Optimizer steps, where the recipe gives the length of the run in other units.

    Raises:
        ConfigError: The processes did not become the one run that was launched.
        ConfigError: The launch file asks for fp8, which cannot be had here.
    """
    verify_fp8(launch.precision)
    keep_from_accelerate(launch)
    if launch.engine == "DEEPSPEED":
        # By their old names DeepSpeed 0.19 calls collectives of torch 2.13, several times a step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    precision = resolve_precision(config, launch.precision)
    arguments = {**config.training, **_OF_RECIPE.get(config.recipe, {}), **_ALWAYS, **precision}
    # Every parameter takes part in every loss; looking for idle ones would walk the graph once more a step.
    arguments.setdefault("ddp_find_unused_parameters", False)
    arguments["accelerator_config"] = {
        # accelerate would join the batches of all processes of a stream, which are of unlike lengths.
        "dispatch_batches": False,
        # From pinned memory, so that the host need not wait for a copy to end.
        "non_blocking": not precision["use_cpu"] and arguments.get("dataloader_pin_memory") is not False,
    }
    is_cuda = torch.cuda.is_available() and not precision["use_cpu"]
    if is_cuda and not config.data.dataset_streaming:
        # A micro-batch is collated while the GPU computes; a stream is one shard, which one process reads.
        arguments.setdefault("dataloader_num_workers", 2)
    compilation = choose_compilation(config, launch, is_cuda=is_cuda)
    # Upstream would compile the whole model; the trainer compiles its layers.
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        arguments.pop(key, None)
    arguments |= choose_liger(config, launch, is_cuda=is_cuda)
    if not has_eval:
        arguments |= {"eval_strategy": "no", "eval_on_start": False, "eval_steps": None}
    if (metric := arguments.get("metric_for_best_model")) and arguments.get("greater_is_better") is None:
        arguments["greater_is_better"] = _FALLS.search(metric) is None
    if num_steps is not None:
        arguments["max_steps"] = num_steps
    if arguments.get("optim") not in {None, *(optimizer.value for optimizer in OptimizerNames)}:
        # Upstream has no such name; the trainer builds it.
        arguments["optim"] = "adamw_torch"
    args: TrainingArguments = _ARGUMENT_CLASSES.get(config.recipe, TrainingArguments)(**arguments)
    # Upstream would spread the rows of one process over all GPUs that it sees by `DataParallel`: another batch than was
    # planned, on copies of a model that is not made to be copied.
    args._n_gpu = min(args.n_gpu, 1)
    # Ours among upstream's save_ keys.
    args.save_keep_steps = config.checkpoints.save_keep_steps  # type: ignore[attr-defined]
    args.compilation = compilation  # type: ignore[attr-defined]
    verify_launch(launch, args.world_size, args.distributed_state.distributed_type)
    return args


def get_compute_dtype(args: TrainingArguments) -> torch.dtype:
    """Return the precision of the matrix products; under fp8 that of those which stay as they are."""
    if args.bf16 or args.mixed_precision == "fp8":
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def build_autocast(args: TrainingArguments) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of autocast contexts, for models that no trainer has prepared."""
    dtype = get_compute_dtype(args)
    if dtype == torch.float32:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, args.device.type, dtype)


def get_rounding_dtype(model: PreTrainedModel, args: TrainingArguments) -> torch.dtype:
    """Return the coarser one of the precisions of the weights and of the products: what results are rounded to."""
    dtype = min(model.dtype, get_compute_dtype(args), key=lambda dtype: dtype.itemsize)
    # TF32 has the ten bits of float16's fraction. Read here, since environment and libraries switch it on too.
    is_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if is_tf32 else dtype

"""Training arguments: builds transformers' or TRL's ``TrainingArguments`` from a recipe and its launch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.training_args import OptimizerNames
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.hardware import supports_bf16
from recipes_lib.models.inference import find_factor_dtype
from recipes_lib.training.collectives import is_distributed
from recipes_lib.training.layouts.launch_environment import Launch, disable_accelerate_parallelism, verify_launch
from recipes_lib.training.optim.compilation import choose_compilation, choose_liger, verify_compiler

MIN_CAPABILITY: Final = (8, 9)
"""CUDA compute capability of Ada, the first generation with fp8 tensor cores."""

_DIVISOR: Final = 16
"""``torch._scaled_mm`` needs matrix sizes that are multiples of this number."""
_OTHER_LAUNCH_FILE: Final = "use another launch file, such as accelerate_configs/single_gpu.yaml"


def verify_fp8(launched_precision: str) -> None:
    """Raise if accelerate cannot run this fp8 launch, or would silently use another precision.

    Args:
        launched_precision: ``mixed_precision`` of the launch file.

    Raises:
        ConfigError: torchao is not installed.
        ConfigError: The device is not a GPU of at least ``MIN_CAPABILITY``.

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
        found = f"fp8 needs a GPU of compute capability {wanted} or higher; this machine has {has}"
        problems.append(Problem("launch", found, _OTHER_LAUNCH_FILE))
    if problems:
        raise ConfigError(*problems)


def verify_fp8_layers(model: nn.Module) -> None:
    """Raise if no layer of the model supports fp8.

    Raises:
        ConfigError: Excluding the first and last, no ``nn.Linear`` has input and output sizes that are multiples of 16.

    Source: accelerate ``filter_first_and_last_linear_layers``; see ``tests/training/trainers/test_arguments.py``.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not any(layer.in_features % _DIVISOR == 0 == layer.out_features % _DIVISOR for layer in linear[1:-1]):
        found = f"fp8 would change nothing: {type(model).__name__} has no inner nn.Linear with sizes in multiples of 16"
        raise ConfigError(Problem("launch", found, f"choose another model_type, or {_OTHER_LAUNCH_FILE}"))


# Rows are already tokenised, masked and packed: disables TRL's own preparation.
_PREPARED: Final = {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": False, "max_length": None}
# An evaluation samples one answer per prompt.
_SAMPLED: Final = {"num_generations_eval": 1}
_OF_RECIPE: Final[Mapping[str, tuple[type[TrainingArguments], Mapping[str, Any]]]] = {
    "sft": (SFTConfig, _PREPARED),
    "lora": (SFTConfig, _PREPARED),
    "distill": (SFTConfig, _PREPARED),
    "reward": (RewardConfig, {"max_length": None}),
    "dpo": (DPOConfig, {"max_length": None}),
    "rloo": (RLOOConfig, _SAMPLED),
    "grpo": (GRPOConfig, _SAMPLED),
    "ppo": (TrainingArguments, {}),
    # ``PretrainTrainer`` builds its own scheduler, whose warm-up and decay are measured in tokens.
    "pretrain": (TrainingArguments, {"lr_scheduler_type": "constant", "warmup_steps": 0}),
}
"""Recipe -> class of its arguments, and those that the user cannot set."""
_LOWER_IS_BETTER: Final = re.compile(
    r"(?:^|[/_])(?:\w*loss|nll|kl|\w*divergence|\w*perplexity|bits_per_byte|brier_score|ece|error(?:_rate)?|[wct]er|r?mse"
    r"|mae|s?mape|unparsable|seconds)$"
)
"""Names of metrics of which less is better; ``TrainingArguments`` recognises names that end in ``loss`` only."""
_OVERRIDES: dict[str, Any] = {
    "disable_tqdm": True,
    "remove_unused_columns": False,
    # Upstream uploads during training, before a checkpoint is verified; recipes_lib/publish/publishing.py uploads.
    "push_to_hub": False,
    # Upstream's default logs the running mean in place of a NaN loss, which hides divergence.
    "logging_nan_inf_filter": False,
    # One normaliser over all ranks and micro-batches: the loss does not depend on gradient accumulation.
    "average_tokens_across_devices": True,
}


def resolve_precision(config: RecipeConfig, launched: str = "no") -> dict[str, Any]:
    """Return ``bf16``, ``fp16`` and ``use_cpu``: the recipe's, else the launch file's, else bf16 on hardware with it.

    Args:
        config: The recipe.
        launched: ``mixed_precision`` of the launch file; ``no`` leaves the choice to the hardware.
    """
    training = config.training
    bf16, fp16 = training.get("bf16"), training.get("fp16")
    # accelerate applies the launch file's precision even if the arguments name none, so they must name the same.
    if fp16 is None:
        fp16 = launched == "fp16" and not bf16
    use_cpu = bool(training.get("use_cpu")) or not torch.accelerator.is_available()
    if launched == "fp8":
        # accelerate computes the other products in bf16; with `bf16` in the arguments, it would compute all in bf16.
        bf16 = False
    elif bf16 is None:
        bf16 = not fp16 and (launched == "bf16" or supports_bf16(use_cpu=use_cpu))
    return {"bf16": bf16, "fp16": bool(fp16), "use_cpu": use_cpu}


def build_training_arguments(
    config: RecipeConfig, launch: Launch, *, has_eval: bool, num_steps: int | None = None
) -> TrainingArguments:
    """Build the arguments of a run and initialise the process group; all ranks must call.

    Args:
        config: The recipe.
        launch: How this process was launched.
        has_eval: Whether there is held-out data; otherwise evaluation is disabled.
        num_steps: Optimizer steps, if the recipe gives the length of the run in tokens; overrides ``max_steps``.

    Raises:
        ConfigError: As ``verify_launch``: accelerate has silently changed the launch.
        ConfigError: As ``verify_fp8``, ``choose_compilation``, ``verify_compiler`` and ``choose_liger``; torch lacks
            ``ddp_backend``, or transformers refuses the keys.
    """
    verify_fp8(launch.precision)
    disable_accelerate_parallelism(launch)
    # DeepSpeed 0.19 calls deprecated names of torch 2.13's collectives, several times per step, and accelerate 1.15
    # passes an option of DDP by its deprecated name.
    warnings.filterwarnings("ignore", r"`(torch\.distributed\.\w+|broadcast_buffers)` is deprecated", FutureWarning)
    precision = resolve_precision(config, launch.precision)
    arguments = {**config.training, **_OF_RECIPE[config.recipe][1], **_OVERRIDES, **precision}
    # Every parameter contributes to every loss; searching for unused ones traverses the graph once more per step.
    arguments.setdefault("ddp_find_unused_parameters", False)
    # Buffers of language models, such as rotary frequencies, are constants: a broadcast per step would not change them.
    arguments.setdefault("ddp_broadcast_buffers", False)
    arguments["accelerator_config"] = {
        # For a stream, accelerate would concatenate the batches of all ranks on rank 0, whose lengths differ.
        "dispatch_batches": False,
        # Copies from pinned memory do not block the host.
        "non_blocking": not precision["use_cpu"] and arguments.get("dataloader_pin_memory") is not False,
        # By default, accelerate accumulates unsharded gradients under FSDP2: every rank would hold all of them.
        "gradient_accumulation_kwargs": {"sync_each_batch": launch.engine == "FSDP"},
    }
    is_cuda = torch.cuda.is_available() and not precision["use_cpu"]
    if is_cuda and not config.data.dataset_streaming:
        # Workers collate the next micro-batch during the computation; a stream has one shard, so no workers.
        arguments.setdefault("dataloader_num_workers", 2)
    if sys.platform == "linux" and arguments.get("dataloader_num_workers"):
        # Python 3.14 starts workers by a server, and a signal to the process group would end them before the run saves.
        arguments.setdefault("dataloader_multiprocessing_context", "fork")
    compilation = choose_compilation(config, launch, is_cuda=is_cuda)
    verify_compiler(compilation, launch)
    # Upstream would compile the whole model; ``RecipeTrainer.train`` compiles layer by layer.
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        arguments.pop(key, None)
    arguments |= choose_liger(config, launch, is_cuda=is_cuda)
    if not has_eval:
        # Commands that do not train read the configuration of a run that keeps its best model, too.
        unset = {"eval_on_start": False, "eval_steps": None, "load_best_model_at_end": False}
        arguments |= {"eval_strategy": "no", **unset}
    arguments["report_to"] = config.read("report_to") or "none"  # Upstream takes null for the name of a tracker.
    # torch refuses the integer 0 beside a float.
    arguments |= {key: float(arguments[key]) for key in ("adam_beta1", "adam_beta2") if key in arguments}
    if arguments.get("save_strategy") == "best":
        # Upstream's default of `load_best_model_at_end`, but not of this.
        arguments["metric_for_best_model"] = arguments.get("metric_for_best_model") or "loss"
    if (metric := arguments.get("metric_for_best_model")) and arguments.get("greater_is_better") is None:
        arguments["greater_is_better"] = _LOWER_IS_BETTER.search(metric) is None
    if num_steps is not None:
        arguments["max_steps"] = num_steps
    if arguments.get("optim") not in {None, *(optimizer.value for optimizer in OptimizerNames)}:
        # A name of this library (such as ``muon``): the trainer builds the optimizer.
        arguments["optim"] = "adamw_torch"
    args = _construct(config, arguments, launch)
    # With several visible GPUs, upstream wraps the model of a single process in `DataParallel`: a larger batch than
    # planned, on replicas, which the patched loss head does not support.
    args._n_gpu = min(args.n_gpu, 1)
    # Keys of this library that the trainer reads from its arguments.
    args.save_keep_steps = config.checkpoints.save_keep_steps  # type: ignore[attr-defined]
    args.compilation = compilation  # type: ignore[attr-defined]
    verify_launch(launch, args.world_size, args.distributed_state.distributed_type)
    return args


def _construct(config: RecipeConfig, arguments: dict[str, Any], launch: Launch) -> TrainingArguments:
    backend = arguments.get("ddp_backend")
    if backend and not torch.distributed.is_backend_available(backend):
        where, found = config.locate("ddp_backend"), f"this torch has no backend {backend!r}"
        raise ConfigError(Problem(where, found, "delete the line: the default is nccl on GPUs and gloo on CPUs"))
    if launch.world_size == 1:
        # accelerate 1.15 would look for a process group.
        arguments = {**arguments, "ddp_backend": None}
    if arguments["use_cpu"] and launch.world_size > 1 and not is_distributed():
        # transformers 5.23 ignores `ddp_timeout` on CPUs; accelerate takes the process group that exists.
        timeout = timedelta(seconds=arguments.get("ddp_timeout", TrainingArguments.ddp_timeout))
        torch.distributed.init_process_group(backend or "gloo", timeout=timeout)
    try:
        return _OF_RECIPE[config.recipe][0](**arguments)
    except ValueError as error:
        # Upstream's checks of combinations, such as a plateau scheduler without evaluation.
        key = next((name for name in config.training if name in str(error)), "training arguments")
        raise ConfigError(Problem(config.locate(key), str(error), "write another value, or delete the line")) from error
    except NotImplementedError as error:
        # accelerate refuses several RTX 40 GPUs with a driver before 550, also for one process.
        raise ConfigError(Problem("launch", str(error), "update the driver, or start by `recipes launch`")) from error


def get_compute_dtype(args: TrainingArguments) -> torch.dtype:
    """Return the dtype of matrix products; under fp8, that of the layers without 8-bit products."""
    if args.bf16 or args.mixed_precision == "fp8":
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def build_autocast(args: TrainingArguments) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of autocast contexts, for models that accelerate has not prepared."""
    dtype = get_compute_dtype(args)
    if dtype == torch.float32:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, args.device.type, dtype)


def get_rounding_dtype(model: PreTrainedModel, args: TrainingArguments) -> torch.dtype:
    """Return the dtype that bounds the rounding error of results: the narrower one of weights and matrix products.

    For 8-bit weights, ``bfloat16``: activations are rounded to 8 bits too, and which columns are not, because they have
    outliers, depends on all rows of a batch.
    """
    if getattr(model, "is_loaded_in_8bit", False):
        return torch.bfloat16
    return find_factor_dtype(min(model.dtype, get_compute_dtype(args), key=lambda dtype: dtype.itemsize))

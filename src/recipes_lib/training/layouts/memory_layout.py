"""Memory layout of a launch: models it supports, choice of activation checkpointing, planned memory and time."""

from __future__ import annotations

from contextlib import suppress

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.hardware import read_device_memory
from recipes_lib.models.parallel.context_parallel import verify_context_parallel
from recipes_lib.models.parallel.pipeline_parallel import verify_pipeline_parallel
from recipes_lib.models.parallel.tensor_parallel import verify_tensor_parallel
from recipes_lib.planning.activations import AUTO, list_keys
from recipes_lib.planning.compute import RL_RECIPES, compute_hours, count_step, find_planned_model
from recipes_lib.planning.devices import find_efficiency, find_peak
from recipes_lib.planning.memory import plan_memory, settle_checkpointing
from recipes_lib.planning.memory_plan import Held, Layout, MemoryPlan
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.optim.compilation import choose_liger


def choose_checkpointing(config: RecipeConfig, launch: Launch) -> tuple[RecipeConfig, str]:
    """Resolve ``activation_checkpointing: auto``; return the run, and the choice with its reason in words.

    On a GPU it is the fastest kind whose planned memory fits; otherwise none, because host memory is larger than the
    needs of CPU training. Without a plan, every layer is recomputed.

    Args:
        config: The run; with anything but ``auto`` it stays, and there are no words.
        launch: How its processes hold the model. All ranks have GPUs of one size: each chooses for itself.
    """
    if config.read("activation_checkpointing") != AUTO:
        return config, ""
    if (size := _find_device_memory(config)) is None:
        mode, why = "none", "there is no GPU"
    elif not _has_length(config):
        mode, why = "every layer", "without `max_length` memory is not planned"
    else:
        try:
            plan = _plan(config, launch, size)
        except Exception as error:  # An unknown architecture may raise any error here, and still train.
            mode, why = "every layer", f"memory could not be planned: {error}"
        else:
            return settle_checkpointing(config, plan), f"{plan.checkpointing} ({plan.explain_choice(size)})"
    settled = config.with_training(list_keys(mode))
    return settled, f"{mode} ({why})"


def plan_run(config: RecipeConfig, launch: Launch, device_name: str) -> dict[str, float] | None:
    """Return the planned memory and time of a process for ``run.json``; ``None`` without a GPU or a plan.

    ``memory_bytes`` is PyTorch's allocation, ``step_seconds`` an optimizer step of full rows, which is omitted for GPUs
    of unknown peak and for reinforcement learning.

    Args:
        config: The run, after ``choose_checkpointing``.
        launch: How its processes hold the model.
        device_name: Of its GPU.
    """
    if (size := _find_device_memory(config)) is None or not _has_length(config):
        return None
    planned: dict[str, float] = {}
    # As above: an unknown architecture trains without a plan, and a new GPU has no known peak.
    with suppress(Exception):
        planned["memory_bytes"] = _plan(config, launch, size).allocated
        if config.recipe not in RL_RECIPES:
            peak, (mfu, _) = find_peak(device_name, config), find_efficiency(config)
            num_flops = count_step(config, find_planned_model(config), launch.data_size).num_flops
            planned["step_seconds"] = 3600 * compute_hours(num_flops, launch.world_size, peak, mfu)
    return planned or None


def _find_device_memory(config: RecipeConfig) -> int | None:
    return None if config.training.get("use_cpu") else read_device_memory()


def _has_length(config: RecipeConfig) -> bool:
    return config.tokens.max_length is not None or config.recipe in RL_RECIPES


def _plan(config: RecipeConfig, launch: Launch, size: int) -> MemoryPlan:
    layout = build_layout(launch, launch.engine, config.read("gradient_accumulation_steps"))
    # Liger's kernels save less for the backward pass, and are on wherever they can be used.
    kernels = choose_liger(config, launch, is_cuda=True)
    config = config.with_training(kernels)
    return plan_memory(config, find_planned_model(config), layout, device_bytes=size)


def build_layout(launch: Launch, name: str, num_batches: int) -> Layout:
    """Return how the ranks of a launch share a model.

    Args:
        launch: Of ``plan_launch``.
        name: Of the launch file.
        num_batches: Micro-batches of an optimizer step.
    """
    layout, stages = launch.layout, launch.layout.pipeline_stages
    zero = {"FSDP": 3, "DEEPSPEED": layout.zero_stage}.get(launch.engine, 0)
    size = launch.world_size // (launch.tensor_size * stages * layout.sizes.get("dp_replicate", 1))
    weights, gradients, states = (size if zero >= least else 1 for least in (3, 2, 1))
    if layout.offloads_optimizer or layout.offloads_weights:
        weights, gradients, states = 0 if layout.offloads_weights else weights, 0, 0
    # The first stage is ahead of the last by one micro-batch per stage; with two chunks per rank (interleaved), it
    # holds half of those twice (Narayanan et al. 2021, section 2.2).
    in_flight = {"1f1b": min(stages, num_batches), "gpipe": num_batches, "interleaved": stages + (stages - 1) / 2}
    return Layout(
        launch_file=name,
        num_processes=launch.data_size,
        shards=Held(weights, gradients, states),
        tensor=launch.tensor_size,
        context=launch.context_size,
        gathers_keys=launch.context_size > 1 and not launch.shares_by_heads,
        pipeline_stages=stages,
        in_flight=in_flight[layout.schedule] if stages > 1 else 1,
        is_deepspeed=launch.engine == "DEEPSPEED",
    )


def verify_model(model_config: PreTrainedConfig, launch: Launch) -> None:
    """Raise for a model that the parallelism of a launch does not support, before any weight is loaded.

    Raises:
        ConfigError: As ``verify_tensor_parallel``, ``verify_context_parallel`` and ``verify_pipeline_parallel``.
    """
    if launch.tensor_size > 1:
        verify_tensor_parallel(model_config, launch.tensor_size)
    if launch.context_size > 1:
        verify_context_parallel(model_config, launch.context_size, by_heads=launch.shares_by_heads)
    if launch.part:
        verify_pipeline_parallel(model_config, launch.part)

"""Memory layout of a launch: activation checkpointing, planned memory and time, supported models."""

from __future__ import annotations

from contextlib import suppress

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.hardware import read_device_memory
from recipes_lib.models.parallel.context_parallel import verify_context_parallel
from recipes_lib.models.parallel.pipeline_parallel import verify_pipeline_parallel
from recipes_lib.models.parallel.tensor_parallel import verify_tensor_parallel
from recipes_lib.planning.activations import AUTO, list_keys
from recipes_lib.planning.compute import RL_RECIPES, compute_hours, compute_model_size, count_step, find_planned_model
from recipes_lib.planning.devices import choose_device, find_efficiency, verify_peak
from recipes_lib.planning.memory import plan_memory, resolve_checkpointing
from recipes_lib.planning.memory_plan import Held, Layout, MemoryPlan
from recipes_lib.planning.timing import list_costs
from recipes_lib.training.guards.expected_curve import expect_loss
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.optim.compilation import choose_compilation, choose_liger


def choose_checkpointing(config: RecipeConfig, launch: Launch) -> tuple[RecipeConfig, str]:
    """Resolve ``activation_checkpointing: auto``; return the run, and the choice with its reason for the log.

    On a GPU, the choice is the fastest mode whose planned memory fits, or every layer if memory cannot be planned; on a
    CPU, it is no checkpointing, because CPU runs are small.

    Args:
        config: The run; without ``auto``, it is returned unchanged with an empty reason.
        launch: The launch. Each rank chooses for itself, which assumes GPUs with equal memory.
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
            return resolve_checkpointing(config, plan), f"{plan.checkpointing} ({plan.explain_choice(size)})"
    return config.with_training(list_keys(mode)), f"{mode} ({why})"


def plan_run(config: RecipeConfig, launch: Launch, device_name: str) -> dict[str, float] | None:
    """Return the planned memory and time of a process, and the expected loss, for ``run.json``; ``None`` without any.

    Memory and time need a GPU, the loss ``expected_curve``. ``memory_bytes`` is the peak memory allocated by PyTorch.
    ``step_seconds`` is the time of an optimizer step of full rows; it is omitted for GPUs of unknown peak throughput,
    and for recipes that sample.

    Args:
        config: The run, after ``choose_checkpointing``.
        launch: The launch.
        device_name: Name of the GPU.
    """
    planned = expect_loss(config)
    if (size := _find_device_memory(config)) is None or not _has_length(config):
        return planned or None
    # Planning is optional: an unknown architecture may raise any error, and a new GPU has no known peak.
    with suppress(Exception):
        planned["memory_bytes"] = _plan(config, launch, size).allocated
        if config.recipe not in RL_RECIPES and not config.distillation.lmbda:
            layout = build_layout(launch, launch.engine, config.read("gradient_accumulation_steps"))
            device, (mfu, _) = choose_device(device_name), find_efficiency(layout.choose_compilation(config))
            verify_peak(device, config)
            model = find_planned_model(config)
            num_flops = count_step(config, model, launch.data_size).num_flops
            seconds = 3600 * compute_hours(num_flops, launch.world_size, device.flops, mfu)
            costs = list_costs(config, model, compute_model_size(model).total, layout, device, seconds, mfu)
            planned["step_seconds"] = sum(costs.values())
    return planned or None


def _find_device_memory(config: RecipeConfig) -> int | None:
    return None if config.training.get("use_cpu") else read_device_memory()


def _has_length(config: RecipeConfig) -> bool:
    return config.tokens.max_length is not None or config.recipe in RL_RECIPES


def _plan(config: RecipeConfig, launch: Launch, size: int) -> MemoryPlan:
    layout = build_layout(launch, launch.engine, config.read("gradient_accumulation_steps"))
    # Fused operations, the default where they are supported, save fewer activations.
    compiles = choose_compilation(config, launch, is_cuda=True) is not None
    config = config.with_training({**choose_liger(config, launch, is_cuda=True), "torch_compile": compiles})
    return plan_memory(config, find_planned_model(config), layout, device_bytes=size)


def build_layout(launch: Launch, name: str, num_batches: int) -> Layout:
    """Return how a launch divides a model over ranks, for ``plan_memory``.

    Args:
        launch: The launch, read or planned (``plan_launch``).
        name: Name of the launch file, for the plan's text.
        num_batches: Micro-batches per optimizer step.
    """
    layout, stages = launch.layout, launch.layout.pipeline_stages
    # Number of shards of weights (ZeRO-3), gradients (ZeRO-2) and optimizer states (ZeRO-1); 0: on the host.
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

"""How the processes of a launch hold a model, and the activation checkpointing that fits their devices."""

from __future__ import annotations

import dataclasses

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.hardware import read_device_memory
from recipes_lib.planning.activations import AUTO, list_keys
from recipes_lib.planning.compute import RL_RECIPES, find_planned_model
from recipes_lib.planning.memory import plan_memory, settle_checkpointing
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.training.layouts.launch_environment import Launch


def choose_checkpointing(config: RecipeConfig, launch: Launch) -> tuple[RecipeConfig, str]:
    """Return a run with the activation checkpointing that ``auto`` means here, and which that is and why, in words.

    On a GPU the fastest kind by which the plan of its memory fits; elsewhere none, since host memory is larger than
    what CPUs train. Where nothing can be planned every layer is recomputed.

    Args:
        config: The run; with anything but ``auto`` it stays, and there are no words.
        launch: How its processes hold the model. All ranks have GPUs of one size: each chooses for itself.
    """
    if config.read("activation_checkpointing") != AUTO:
        return config, ""
    size = None if config.training.get("use_cpu") else read_device_memory()
    if size is None:
        mode, why = "none", "there is no GPU"
    elif config.tokens.max_length is None and config.recipe not in RL_RECIPES:
        mode, why = "every layer", "without `max_length` memory is not planned"
    else:
        layout = build_layout(launch, launch.engine, config.read("gradient_accumulation_steps"))
        try:
            plan = plan_memory(config, find_planned_model(config), layout, device_bytes=size)
        except Exception as error:  # An unknown architecture may raise anything here, and still train.
            mode, why = "every layer", f"memory could not be planned: {error}"
        else:
            return settle_checkpointing(config, plan), f"{plan.checkpointing} ({plan.explain_choice(size)})"
    settled = dataclasses.replace(config, training={**config.training, **list_keys(mode)})
    return settled, f"{mode} ({why})"


def build_layout(launch: Launch, name: str, num_batches: int) -> Layout:
    """Return how the processes of a launch hold a model.

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
    # The first stage is ahead of the last by as many micro-batches as there are stages between them; of two chunks in
    # turns it holds half of those twice (Narayanan et al. 2021, section 2.2).
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

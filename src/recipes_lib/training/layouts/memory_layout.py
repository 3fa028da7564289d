"""How the processes of a launch hold a model, for a plan of their memory."""

from __future__ import annotations

from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.training.layouts.launch_environment import Launch


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

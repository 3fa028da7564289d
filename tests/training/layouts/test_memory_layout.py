"""A launch file says how its processes hold a model."""

from __future__ import annotations

import pytest

from recipes_lib.shipped import find_launch_file
from recipes_lib.training.layouts.launch_environment import name_pipeline, plan_launch
from recipes_lib.training.layouts.memory_layout import build_layout

SHARDS = {
    "single_gpu": (1, 1, 1),
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 8),
    "zero2": (1, 8, 8),
    "zero3": (8, 8, 8),
    "zero3_offload": (8, 0, 0),
    "zero3_sp": (8, 8, 8),
    "fsdp2": (8, 8, 8),
    "fsdp2_cp": (8, 8, 8),
    "fsdp2_offload": (0, 0, 0),
    "fsdp2_tp": (2, 2, 2),
    "hsdp": (8, 8, 8),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_launch_file_says_who_shares_weights_gradients_and_states(name) -> None:
    layout = build_layout(plan_launch(find_launch_file(name)), name, 4)
    assert layout.shards == SHARDS[name]
    assert layout.is_deepspeed == name.startswith("zero")
    sizes = {"fsdp2_tp": (8, 1, False), "fsdp2_cp": (1, 4, True), "zero3_sp": (1, 4, False)}
    assert (layout.tensor, layout.context, layout.gathers_keys) == sizes.get(name, (1, 1, False))


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", 4), ("gpipe", 16), ("interleaved", 5.5)])
def test_a_schedule_says_how_many_micro_batches_are_in_flight(schedule, in_flight) -> None:
    launch = plan_launch(find_launch_file("ddp"), 8, name_pipeline(4, schedule))
    assert build_layout(launch, "ddp", 16).in_flight == in_flight
    assert build_layout(launch, "ddp", 16).num_processes == 2

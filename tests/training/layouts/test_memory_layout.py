"""Memory layout of launch files, automatic activation checkpointing, and the planned cost of a run."""

from __future__ import annotations

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import find_launch_file
from recipes_lib.planning.activations import MODES, list_keys
from recipes_lib.training.layouts.launch_environment import Launch, name_pipeline, plan_launch
from recipes_lib.training.layouts.memory_layout import build_layout, choose_checkpointing, plan_run

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
def test_shard_counts_by_launch_file(name) -> None:
    layout = build_layout(plan_launch(find_launch_file(name)), name, 4)
    assert layout.shards == SHARDS[name]
    assert layout.is_deepspeed == name.startswith("zero")
    sizes = {"fsdp2_tp": (8, 1, False), "fsdp2_cp": (1, 4, True), "zero3_sp": (1, 4, False)}
    assert (layout.tensor, layout.context, layout.gathers_keys) == sizes.get(name, (1, 1, False))


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", 4), ("gpipe", 16), ("interleaved", 5.5)])
def test_micro_batches_in_flight_by_pipeline_schedule(schedule, in_flight) -> None:
    launch = plan_launch(find_launch_file("ddp"), 8, name_pipeline(4, schedule))
    assert build_layout(launch, "ddp", 16).in_flight == in_flight
    assert build_layout(launch, "ddp", 16).num_processes == 2
    sharded = plan_launch(find_launch_file("fsdp2"), 8, name_pipeline(4, schedule))
    assert build_layout(sharded, "fsdp2", 16).shards == (2, 2, 2)


@pytest.fixture
def configure(tiny_model_dir, tmp_path):
    def build(**keys):
        paths = {"model_name_or_path": tiny_model_dir, "dataset_name": "owner/rows", "output_dir": tmp_path / "out"}
        flags = {**paths, "max_length": 64, "activation_checkpointing": "auto", **keys}
        return load_config("sft", [f"--{name}={value}" for name, value in flags.items()])

    return build


CASES = [
    ({}, None, "none", "there is no GPU"),
    ({"use_cpu": "true"}, 80e9, "none", "there is no GPU"),
    ({}, 80e9, "none", "may be planned"),
    ({}, 1e9, "every layer", "may be planned"),
    ({"max_length": "null"}, 80e9, "every layer", "without `max_length`"),
    ({"model_name_or_path": "nowhere/at_all"}, 80e9, "every layer", "could not be planned"),
]


@pytest.mark.parametrize(("keys", "memory", "mode", "reason"), CASES)
def test_auto_checkpointing_by_device_memory(configure, monkeypatch, keys, memory, mode, reason) -> None:
    monkeypatch.setattr("recipes_lib.training.layouts.memory_layout.read_device_memory", lambda: memory)
    chosen, line = choose_checkpointing(configure(**keys), plan_launch(None))
    assert {name: chosen.training.get(name) for name in list_keys(mode)} == list_keys(mode)
    assert line.startswith(f"{mode} (")
    assert reason in line


@pytest.mark.parametrize("value", ["true", "false"])
def test_explicit_checkpointing_is_kept(configure, monkeypatch, value) -> None:
    monkeypatch.setattr("recipes_lib.training.layouts.memory_layout.read_device_memory", lambda: 1e6)
    config = configure(activation_checkpointing=value)
    assert choose_checkpointing(config, plan_launch(None)) == (config, "")
    assert set(MODES) == {"none", "save_matmuls", "every 2nd layer", "every layer"}


def test_plan_of_run_on_gpu(configure, monkeypatch) -> None:
    """Recomputing every layer takes a third more time and less memory; traffic to a second GPU takes time."""
    monkeypatch.setattr("recipes_lib.training.layouts.memory_layout.read_device_memory", lambda: 80e9)
    one, two = (Launch(rank=0, local_rank=0, world_size=size, engine="") for size in (1, 2))
    kept, recomputed = (
        plan_run(configure(activation_checkpointing=value), one, "NVIDIA H100 80GB HBM3") for value in ("false", "true")
    )
    assert recomputed["step_seconds"] == pytest.approx(kept["step_seconds"] * 4 / 3, rel=5e-3)
    assert recomputed["memory_bytes"] < kept["memory_bytes"]
    assert plan_run(configure(activation_checkpointing="false"), two, "H100")["step_seconds"] > kept["step_seconds"]
    # The peak throughput of an unknown GPU is unknown.
    assert plan_run(configure(activation_checkpointing="false"), one, "Abacus") == {
        "memory_bytes": kept["memory_bytes"]
    }
    assert plan_run(configure(use_cpu="true"), one, "H100") is None
    assert plan_run(configure(model_name_or_path="nowhere/at_all"), one, "H100") is None


def test_plan_of_run_is_eager_where_ranks_share_layers(configure, monkeypatch) -> None:
    """As ``choose_compilation`` decides then: the MFU of a compiled run would promise too short a step."""
    monkeypatch.setattr("recipes_lib.training.layouts.memory_layout.read_device_memory", lambda: 80e9)
    # Of so many tokens that the traffic of weights is hidden by compute.
    large = {"activation_checkpointing": "false", "per_device_train_batch_size": "8192"}
    shared = plan_launch(find_launch_file("fsdp2_cp"))
    for launch, is_shorter in ((plan_launch(None), True), (shared, False)):
        eager, compiled = (
            plan_run(configure(torch_compile=value, **large), launch, "H100")["step_seconds"]
            for value in ("false", "true")
        )
        assert (compiled < eager) == is_shorter


def test_plan_includes_liger_if_used(configure, monkeypatch) -> None:
    monkeypatch.setattr("recipes_lib.training.layouts.memory_layout.read_device_memory", lambda: 80e9)
    monkeypatch.setattr("recipes_lib.training.optim.compilation.find_compiler_obstacle", lambda: "")
    launch = Launch(rank=0, local_rank=0, world_size=1, engine="")

    def plan(**keys: str) -> float:
        return plan_run(configure(activation_checkpointing="false", **keys), launch, "H100")["memory_bytes"]

    absent = plan()
    monkeypatch.setattr("recipes_lib.training.optim.compilation.is_liger_kernel_available", lambda: True)
    assert plan() == plan(use_liger_kernel="true") < absent
    assert plan(use_liger_kernel="false") == absent

"""Plan search: equal global batch size, order of candidates, traffic closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.planning.runs import build_config
from transformers import AutoConfig, LlamaConfig

from recipes_lib.planning.compute import SHIPPED_SHAPES
from recipes_lib.planning.devices import Device, choose_device
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.search import Candidate, _rank, search
from recipes_lib.planning.timing import Traffic, count_traffic, time_traffic

REPLICATED, SHARDED = Layout("ddp", 2), Layout("fsdp2", 2, Held(2, 2, 2))


def build(model_dir: Path, recipe: str = "sft", **keys: object):
    return build_config(recipe, **{"model_name_or_path": model_dir, "max_length": 256, **keys})


@pytest.fixture(scope="module")
def find(tiny_model_dir: Path):
    def find(memory: float, rows: int = 8, layouts: Sequence[Layout] = (REPLICATED, SHARDED)) -> list[Candidate]:
        device: Device = dataclasses.replace(choose_device("H100"), memory=memory)
        config, model = build(tiny_model_dir), AutoConfig.from_pretrained(tiny_model_dir)
        return search(config, model, layouts, rows, device)

    return find


def test_every_candidate_has_requested_global_batch_size(find) -> None:
    for one in find(80e9):
        micro = one.keys["per_device_train_batch_size"]
        assert micro * one.keys["gradient_accumulation_steps"] * one.layout.num_processes == 8
        # The default of 8 rows needs more memory than is planned.
        assert one.keys["per_device_eval_batch_size"] == micro
    assert not find(80e9, rows=7)


def test_first_candidate_is_fastest_that_fits(find) -> None:
    large = find(80e9)
    assert large[0].fits
    assert large[0].seconds == min(one.seconds for one in large)
    assert large[0].memory.checkpointing in ("none", "save_matmuls")
    # With less memory, another candidate that is not faster.
    middle = sorted(one.memory.peak for one in large)[4]
    small = find(middle)
    assert small[0].fits
    assert small[0].memory.peak <= middle
    assert small[0].seconds >= large[0].seconds
    assert [one.is_tight for one in (large[0], small[0])] == [False, True]
    fits = [one.fits for one in small]
    assert fits == sorted(fits, reverse=True)
    # If none fits, by peak memory.
    none = find(1e9)
    assert not any(one.fits for one in none)
    assert none[0].memory.peak == min(one.memory.peak for one in none)


def test_traffic_matches_ring_collectives(tiny_model_dir: Path) -> None:
    """DDP reduces gradients once per step; FSDP2 gathers weights twice and reduces gradients per micro-batch."""
    config, model = build(tiny_model_dir, gradient_accumulation_steps=3), AutoConfig.from_pretrained(tiny_model_dir)
    assert count_traffic(config, model, 1000, REPLICATED) == Traffic(model=0.5 * 2 * 4 * 1000)
    assert count_traffic(config, model, 1000, SHARDED) == Traffic(model=0.5 * 3 * (2 * 2 + 4) * 1000)
    # A pipeline stage has half of the layers, gathered once for all micro-batches.
    staged = Layout("fsdp2", 2, Held(2, 2, 2), pipeline_stages=2)
    assert count_traffic(config, model, 1000, staged).model == 0.5 * (2 * 2 + 4) * 1000 / 2
    offloaded = Layout("fsdp2_offload", 2, Held(0, 0, 0))
    assert count_traffic(config, model, 1000, offloaded) == Traffic(
        0.5 * 3 * 8 * 1000, host=3 * 8 * 1000 / 2, update=28 * 1000 / 2
    )
    # Two replicas of two shards: weights stay in a replica, gradients of a shard are reduced between them.
    hybrid = Layout("hsdp", 4, Held(2, 2, 2))
    assert count_traffic(config, model, 1000, hybrid) == Traffic(0.5 * 3 * 8 * 1000, replicas=3 * 4 * 1000 / 2)
    # DeepSpeed sends 16-bit gradients: ZeRO-1 reduces them once, ZeRO-2 per micro-batch; both gather updated weights.
    for weights, gradients, sent in ((1, 1, 2 * 2 + 2), (1, 2, 3 * 2 * 2 + 2), (2, 2, 3 * (2 * 2 + 2))):
        layout = Layout("zero", 2, Held(weights, gradients, 2), is_deepspeed=True)
        assert count_traffic(config, model, 1000, layout) == Traffic(model=0.5 * sent * 1000)
    adapter = build(tiny_model_dir, "lora", gradient_accumulation_steps=3)
    assert count_traffic(adapter, model, 1000, REPLICATED) == Traffic()
    # Weights of 4 bits are gathered, and copied from the host, as they are stored.
    adapter = build(tiny_model_dir, "lora", gradient_accumulation_steps=3, load_in_4bit=True)
    assert count_traffic(adapter, model, 1000, SHARDED) == Traffic(model=0.5 * 3 * 2 * 0.5 * 1000)
    assert count_traffic(adapter, model, 1000, offloaded).host == 3 * 2 * 0.5 * 1000 / 2


def test_traffic_between_machines_uses_network() -> None:
    sent = Traffic(model=45e9, replicas=50e9, host=25e9, update=75e9)
    inside, across = Layout("fsdp2", 8, Held(8, 8, 8)), Layout("fsdp2", 16, Held(16, 16, 16))
    assert time_traffic(sent, inside, choose_device("H100"))[0] == pytest.approx(0.1)
    # A ring through the eight adapters of each machine; through four, if only every second GPU is in it.
    assert time_traffic(sent, across, choose_device("H100"))[0] == pytest.approx(45 / 400)
    halved = Layout("fsdp2_tp", 8, Held(8, 8, 8), tensor=2)
    assert time_traffic(sent, halved, choose_device("H100"))[0] == pytest.approx(45 / 200)
    # A pipeline stage sends from one GPU to another.
    staged = time_traffic(Traffic(stages=50e9), Layout("ddp", 8, pipeline_stages=2), choose_device("H100"))
    assert staged.stages == pytest.approx(1)
    # Tensor-parallel groups of two are among the eight GPUs.
    tensor = Layout("fsdp2_tp", 4, Held(4, 4, 4), tensor=2)
    assert time_traffic(sent, tensor, choose_device("H100")).model == pytest.approx(0.1)
    # Hybrid sharding: only gradients of a shard cross machines.
    hybrid = time_traffic(sent, Layout("hsdp", 16, Held(8, 8, 8)), choose_device("H100"))
    # Eight GPUs share the memory of their host.
    assert (hybrid.model, hybrid.replicas, hybrid.host, hybrid.update) == pytest.approx((0.1, 1, 1, 2))
    assert hybrid.model + hybrid.replicas == pytest.approx(1.1)


SHAPE = LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
TOKENS = 2 * 256 * 3
"""Tokens per optimizer step and GPU."""


@pytest.mark.parametrize(
    ("layout", "layers", "stages"),
    [
        # Two all-reduces per layer and pass of 16-bit hidden states, and one outside of layers: each sends
        # 2 (t - 1) / t of its size.
        (Layout("fsdp2_tp", tensor=4), 2 * (2 * 4 + 1) * 2 * 3 / 4 * TOKENS * 64 * 2, 0),
        # Keys and values of three other ranks, and their gradients.
        (Layout("fsdp2_cp", context=4, gathers_keys=True), 2 * 4 * 3 * 2 * (TOKENS / 4 * 2 * 8) * 2, 0),
        # 8 heads of queries and outputs, 2 of keys and values; three quarters are sent.
        (Layout("zero3_sp", context=4), 2 * 4 * 3 / 4 * (TOKENS / 4 * (2 * 8 + 2 * 2) * 8) * 2, 0),
        (Layout("ddp", pipeline_stages=2), 0, 2 * TOKENS * 64 * 2),
    ],
)
def test_traffic_of_model_parallelism_matches_closed_forms(tiny_model_dir: Path, layout, layers, stages) -> None:
    keys = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    found = count_traffic(build(tiny_model_dir, **keys), SHAPE, 0, layout)
    assert (found.layers, found.stages) == (pytest.approx(layers), stages)
    # Recomputation is a third pass.
    again = count_traffic(build(tiny_model_dir, activation_checkpointing=True, **keys), SHAPE, 0, layout)
    assert again.layers == pytest.approx(1.5 * found.layers)


def test_pipeline_bubble_is_added_to_compute(tiny_model_dir: Path) -> None:
    config, model = build(tiny_model_dir, "pretrain"), AutoConfig.from_pretrained(tiny_model_dir)
    layouts = [Layout("ddp", pipeline_stages=2, in_flight=2)]
    found = search(config, model, layouts, 8, choose_device("H100"))
    for one in found:
        share = one.costs["bubble"] / one.costs["compute"]
        assert share == pytest.approx(1 / one.keys["gradient_accumulation_steps"])
    assert min(found, key=lambda one: one.seconds).keys["per_device_train_batch_size"] == 1


SHAPE_OF_8B = SHIPPED_SHAPES["meta-llama/Llama-3.1-8B"] | {"vocab_size": 32_000, "num_hidden_layers": 4}
LLAMA = AutoConfig.for_model(**SHAPE_OF_8B)
"""The layers of Llama 3.1 8B; fewer of them, and a smaller vocabulary, are counted faster."""


def test_long_sequence_fits_only_with_context_parallelism(tiny_model_dir: Path) -> None:
    """Eight rows of 524,288 tokens on eight GPUs: a GPU has one row with FSDP2, an eighth of each with CP."""
    shards = Held(8, 8, 8)
    layouts = [Layout("fsdp2", 8, shards), Layout("fsdp2_cp", 1, shards, context=8, gathers_keys=True)]
    config = build(tiny_model_dir, max_length=524_288)
    found = search(config, LLAMA, layouts, 8, choose_device("H100"))
    best = {one.layout.launch_file: one for one in reversed(found)}
    assert found[0].layout.launch_file == "fsdp2_cp"
    assert best["fsdp2_cp"].fits
    assert not best["fsdp2"].fits


def test_micro_batches_that_fit_only_with_checkpointing_are_candidates(tiny_model_dir: Path) -> None:
    device, layouts = choose_device("H100"), [Layout("fsdp2", 8, Held(8, 8, 8))]
    config = build(tiny_model_dir, max_length=16_384)
    counts = [
        sum(one.memory.peak <= device.memory for one in search(config, LLAMA, layouts, 96, on))
        for on in (device, dataclasses.replace(device, memory=1e15))
    ]
    assert counts[0] == counts[1] > 0


def test_fewer_rows_than_gpus_need_model_parallelism(tiny_model_dir: Path) -> None:
    """Two rows per step on eight GPUs: only tensor-parallel groups of four can divide them."""
    layouts = [Layout("fsdp2", 8, Held(8, 8, 8)), Layout("fsdp2_tp", 2, Held(2, 2, 2), tensor=4)]
    found = search(build(tiny_model_dir, max_length=4096), LLAMA, layouts, 2, choose_device("H100"))
    assert {one.layout.launch_file for one in found} == {"fsdp2_tp"}
    assert found[0].fits


def test_candidates_are_ranked_by_speed_and_margin_then_offload_then_groups_then_rows() -> None:
    shards, keys = Held(2, 2, 2), {"per_device_train_batch_size": 1}
    layouts = [Layout("fsdp2", 2, shards), Layout("fsdp2_cp", 1, shards, context=2), Layout("", 2, Held(0, 0, 0))]
    ranked = [Candidate(one, keys, None, fits=True, costs={"compute": 1.0}) for one in layouts]
    ranked.insert(0, dataclasses.replace(ranked[0], keys={"per_device_train_batch_size": 2}))
    ranked.append(dataclasses.replace(ranked[0], costs={"compute": 1.05}))
    # Plans have been up to 10 % below measurements: without a margin, only what is faster by more comes first.
    ranked.append(dataclasses.replace(ranked[0], is_tight=True))
    ranked.insert(0, dataclasses.replace(ranked[0], costs={"compute": 0.9}, is_tight=True))
    assert sorted((ranked[at] for at in (6, 4, 3, 1, 5, 0, 2)), key=_rank) == ranked


def test_layouts_that_offload_more_than_a_machine_has_are_no_candidates(find, monkeypatch) -> None:
    # A machine has up to eight of the processes.
    for num_processes in (2, 16):
        layouts = [SHARDED, Layout("fsdp2_offload", num_processes, Held(0, 0, 0))]
        found = find(80e9, 16, layouts)
        needed = min(num_processes, 8) * max(one.memory.host_bytes for one in found)
        for host, expected in ((needed, set(layouts)), (needed - 1, {SHARDED})):
            monkeypatch.setattr("recipes_lib.planning.search.HOST_MEMORY", host)
            assert {one.layout for one in find(80e9, 16, layouts)} == expected
        monkeypatch.undo()


def test_ranks_of_a_group_share_the_computation(find) -> None:
    group = Layout("fsdp2_cp", 1, Held(2, 2, 2), context=2, gathers_keys=True)
    found = find(80e9, layouts=[SHARDED, group])
    costs = [min(one.costs["compute"] for one in found if one.layout == layout) for layout in (SHARDED, group)]
    assert costs[1] == pytest.approx(costs[0])


def test_sampled_evaluation_batches_are_planned_as_configured(tiny_model_dir: Path) -> None:
    keys = {"teacher_model_name_or_path": tiny_model_dir, "lmbda": 0.5, "per_device_eval_batch_size": 6}
    config, model = build(tiny_model_dir, "distill", **keys), AutoConfig.from_pretrained(tiny_model_dir)
    found = search(config, model, [REPLICATED], 8, choose_device("H100"))
    assert {one.keys["per_device_eval_batch_size"] for one in found} == {6}


def test_unsupported_keys_are_no_candidates(tiny_model_dir: Path) -> None:
    config, model = build(tiny_model_dir), AutoConfig.from_pretrained(tiny_model_dir)

    def is_supported(layout: Layout, keys: Mapping[str, Any]) -> bool:
        return layout is SHARDED and not keys["torch_compile"]

    found = search(config, model, [REPLICATED, SHARDED], 8, choose_device("H100"), is_supported=is_supported)
    assert {(one.layout, one.keys["torch_compile"]) for one in found} == {(SHARDED, False)}

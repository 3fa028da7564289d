"""Plan search over layouts, micro-batches, activation checkpointing and compilation, for the fastest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.activations import AUTO, Activations, list_keys
from recipes_lib.planning.compute import compute_hours, compute_model_size, count_features, count_step
from recipes_lib.planning.decoding import estimate_on_policy
from recipes_lib.planning.devices import Device, Measured, find_efficiency
from recipes_lib.planning.memory import Batch, count_choices, count_kept, plan_memory, read_checkpointing
from recipes_lib.planning.memory_plan import Layout, MemoryPlan

NETWORK_BYTES: Final = 50e9
"""Bytes per second of a network adapter, of which a machine has one for each GPU: 400 Gbit/s.

Source: NVIDIA/nccl#1221: 320 GB/s for each GPU of a ring through the eight adapters of each of four machines.
"""
GPUS_OF_A_MACHINE: Final = 8
_HOST_BYTES: Final = 25e9
"""Bytes per second between a GPU and its host, by PCIe 4."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of a run.

    Attributes:
        layout: Layout of the processes.
        keys: Keys that the recipe needs.
        memory: Memory plan of one process; its ``checkpointing`` is the kind of activation checkpointing.
        fits: Whether that fits the GPU.
        costs: Seconds of an optimizer step by cause.
    """

    layout: Layout
    keys: Mapping[str, Any]
    memory: MemoryPlan
    fits: bool
    costs: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.costs.values())


def search(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    layouts: Sequence[Layout],
    num_rows: int,
    device: Device,
    measured: Measured | None = None,
    is_supported: Callable[[Layout, Mapping[str, Any]], bool] = lambda layout, keys: True,
) -> list[Candidate]:
    """Return every configuration of an optimizer step of ``num_rows`` rows; fitting ones first, the fastest first.

    Args:
        config: Configuration of the run, whose micro-batch size, accumulation, checkpointing and compilation are
            replaced by those of the candidates.
        model_config: Configuration of the trained model.
        layouts: Layouts of the candidates.
        num_rows: Global batch size in rows, equal in all candidates; a pair is one row.
        device: GPU.
        measured: As for ``find_efficiency``.
        is_supported: Returns whether a layout supports the keys of a candidate.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be loaded.
    """
    found = list[Candidate]()
    whole = {"per_device_train_batch_size": num_rows, "gradient_accumulation_steps": 1}
    num_flops = count_step(config.with_training(whole), model_config, 1).num_flops
    size = compute_model_size(model_config).total
    for layout in layouts:
        # The global batch size is fixed, so a layout that cannot divide it is left out.
        if num_rows % layout.num_processes:
            continue
        rows = num_rows // layout.num_processes
        memory = None
        for number in (number for number in range(1, rows + 1) if rows % number == 0):
            batch = {"per_device_train_batch_size": number, "gradient_accumulation_steps": rows // number}
            compiled = [choice for choice in (True, False) if is_supported(layout, {**batch, "torch_compile": choice})]
            if not compiled:
                continue
            sized = config.with_training({**batch, "activation_checkpointing": AUTO})
            # Weights, gradients and states do not depend on the micro-batch, so they are planned once per layout.
            if memory is None:
                memory = plan_memory(sized, model_config, layout, device_bytes=device.memory)
            plans = list(_list_plans(sized, model_config, memory, device))
            for plan in plans:
                for choice in compiled:
                    keys = {**batch, **list_keys(plan.checkpointing), "torch_compile": choice}
                    changed = config.with_training(keys)
                    share, _ = find_efficiency(changed, measured)
                    seconds = 3600 * compute_hours(num_flops, layout.num_gpus, device.flops, share)
                    sent = time_traffic(count_traffic(changed, model_config, size, layout), layout, device)
                    costs = _list_costs(seconds, sent, rows // number, layout)
                    if share_sampled := config.distillation.lmbda:
                        sampled = estimate_on_policy(changed, model_config, device, share)
                        costs["sampling"] = share_sampled * sampled.seconds
                    found.append(Candidate(layout, keys, plan, plan.peak <= device.memory, costs))
            if all(plan.peak > device.memory for plan in plans):
                break  # Larger micro-batches need more memory.
    found.sort(key=_rank)
    return found


def _rank(one: Candidate) -> tuple[bool, float, bool, int, int]:
    """Sort key: fitting candidates first, by speed, then without offload, less model-parallel, with larger batches.

    Candidates that do not fit are sorted by peak memory. Times do not include the update of offloaded weights.
    """
    groups, rows = one.layout.num_gpus // one.layout.num_processes, one.keys["per_device_train_batch_size"]
    cost = float(f"{one.seconds:.3g}") if one.fits else one.memory.peak
    return not one.fits, cost, not one.layout.shards.weights, groups, -rows


def extrapolate_kept(config: RecipeConfig, narrowed: PreTrainedConfig, layout: Layout) -> Activations:
    """Return the result of ``count_kept``, extrapolated from those of two and three rows, beyond which it is linear."""
    number = config.read("per_device_train_batch_size")
    sizes = (number,) if number <= 3 else (2, 3)
    counted = [
        count_kept(config.with_training({"per_device_train_batch_size": size}), narrowed, layout) for size in sizes
    ]
    return counted[0].extrapolate(counted[-1], number - 2)


def _list_plans(
    config: RecipeConfig, model_config: PreTrainedConfig, memory: MemoryPlan, device: Device
) -> Iterator[MemoryPlan]:
    """Yield the memory of a process with each kind of activation checkpointing, from that of another micro-batch."""
    layout, narrowed = memory.layout, memory.layout.narrow(model_config)
    choices = count_choices(config, narrowed, layout, extrapolate_kept(config, narrowed, layout))
    # 0 for a reward model, which has no logits.
    num_predicted = memory.num_predicted and Batch.of(config, layout).num_targets
    for mode, sizes in choices.items():
        alone = dataclasses.replace(memory, choices={mode: sizes}, num_predicted=num_predicted)
        yield alone.place(device.memory)


def _list_costs(seconds: float, sent: Traffic, num_batches: int, layout: Layout) -> dict[str, float]:
    """Return the seconds of an optimizer step by cause, from those of its matrix products and its traffic.

    Traffic of weights and gradients overlaps with compute; traffic within layers does not.
    """
    bubble = seconds * (layout.pipeline_stages - 1) / num_batches
    return {
        "compute": seconds,
        "bubble": bubble,
        "weight traffic": max(sent.model + sent.replicas - seconds - bubble, 0.0),
        "layer traffic": sent.layers,
        "stage traffic": sent.stages,
        "host traffic": sent.host,
    }


class Traffic(NamedTuple):
    """Bytes that a GPU sends per optimizer step, or the seconds that this takes.

    Attributes:
        model: Weights and gradients within data-parallel or sharding groups.
        replicas: Gradients of shards between the replicas of hybrid sharding.
        layers: Activations, or keys and values, within tensor- and context-parallel groups.
        stages: Hidden states and their gradients between pipeline stages.
        host: Weights and gradients between GPU and host.
    """

    model: float = 0.0
    replicas: float = 0.0
    layers: float = 0.0
    stages: float = 0.0
    host: float = 0.0


def time_traffic(traffic: Traffic, layout: Layout, device: Device) -> Traffic:
    """Return the seconds of traffic from its bytes; groups above ``GPUS_OF_A_MACHINE`` GPUs use the network."""

    def time(num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Return the seconds in groups of every ``stride``-th of ``num_ranks`` consecutive GPUs."""
        rate = device.find_rate(min(num_ranks, GPUS_OF_A_MACHINE))
        if num_ranks > GPUS_OF_A_MACHINE:
            # Each GPU of a ring sends through the network adapters of all its GPUs in the machine.
            rate = min(rate, NETWORK_BYTES * max(GPUS_OF_A_MACHINE // stride, 1))
        return num_bytes / rate

    replica = layout.num_gpus // (layout.replicas * layout.pipeline_stages)
    return Traffic(
        model=time(traffic.model, replica, layout.tensor),
        replicas=time(traffic.replicas, layout.num_gpus, replica),
        layers=time(traffic.layers, layout.tensor * layout.context),
        stages=time(traffic.stages, layout.num_gpus, GPUS_OF_A_MACHINE),
        host=traffic.host / _HOST_BYTES,
    )


def count_gathered(config: RecipeConfig, num_parameters: float, layout: Layout) -> float:
    """Return the bytes that a GPU sends to gather a sharded model once, in 16 or 4 bits; 0 if it is replicated."""
    held = num_parameters / (layout.tensor * layout.pipeline_stages)
    return _find_width(config, 2) * held * _others(layout.shards.weights or layout.num_processes)


def _find_width(config: RecipeConfig, width: int) -> float:
    """Return the bytes of a weight: ``width``, or half a byte if it is sharded and gathered in 4 bits."""
    return 0.5 if config.quantization.load_in_4bit else width


def count_traffic(
    config: RecipeConfig, model_config: PreTrainedConfig, num_parameters: float, layout: Layout
) -> Traffic:
    """Count the traffic of an optimizer step.

    Weights are gathered in 16 bits, or 4, for the forward and the backward pass of each micro-batch, in pipeline stages
    once per step. Gradients are reduced in 32 bits, by DeepSpeed in 16: in DDP, ZeRO-1 and pipeline stages once per
    step, in FSDP2, ZeRO-2 and ZeRO-3 once per micro-batch. ZeRO-1 and ZeRO-2 reduce by all-reduce, and gather the
    updated weights once per step. A frozen model under an adapter has no gradients.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the trained model.
        num_parameters: Parameters of that model.
        layout: Layout of the processes.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7; DeepSpeed 0.19, ``use_multi_rank_bucket_allreduce`` and
    ``partition_gradients``; ``tests/planning/test_search.py``.
    """
    stages = layout.pipeline_stages
    held = num_parameters / (layout.tensor * stages)
    times = 1 if stages > 1 else config.read("gradient_accumulation_steps")
    gradients = 0.0 if config.adapter.use_peft else (2 if layout.is_deepspeed else 4) * held
    layers, between = _count_hidden_states(config, model_config, layout)
    found = Traffic(layers=layers, stages=between)
    if layout.shards.weights == 1:
        passes = 2 * (1 if layout.shards.gradients == 1 else times) + layout.is_deepspeed
        return found._replace(model=passes * gradients * _others(layout.num_processes))
    group = layout.shards.weights or layout.num_processes
    return found._replace(
        model=times * (2 * count_gathered(config, num_parameters, layout) + _others(group) * gradients),
        replicas=2 * _others(layout.replicas) * gradients / group,
        host=0.0 if layout.shards.weights else times * 2 * _find_width(config, 4) * held / layout.num_processes,
    )


def _others(number: int) -> float:
    """Return the share of a tensor that each rank sends in a ring all-gather or reduce-scatter of ``number`` ranks."""
    return (number - 1) / number


def _count_hidden_states(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a GPU sends per optimizer step within layers, and between pipeline stages.

    In each pass, tensor parallelism all-reduces the hidden states after attention and MLP of each layer, and once
    outside of layers; context parallelism gathers keys and values, or exchanges heads for tokens (Ulysses).
    Recomputation of a layer is a third pass.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.2.
    """
    text: Any = model_config.get_text_config()
    batch = Batch.of(config, layout)
    num_tokens = batch.num_rows * batch.length * config.read("gradient_accumulation_steps")
    every = read_checkpointing(config).every
    passes = 2 + (1 / every if every else 0)
    num_layers, hidden = text.num_hidden_layers / layout.pipeline_stages, 2 * num_tokens * text.hidden_size
    queries, keys = (2 * num_tokens * number for number in count_features(model_config))
    sent = 2 * _others(layout.tensor) * hidden * (2 * num_layers + 1)
    if layout.gathers_keys:
        sent += (layout.context - 1) * 2 * keys * num_layers
    elif layout.context > 1:
        sent += _others(layout.context) * 2 * (queries + keys) * num_layers
    return passes * sent, 2 * hidden if layout.pipeline_stages > 1 else 0.0

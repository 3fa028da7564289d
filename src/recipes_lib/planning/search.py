"""Plan search over layouts, micro-batches, checkpointing and compilation, for the fastest or cheapest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.activations import MODES, list_keys
from recipes_lib.planning.compute import compute_hours, compute_model_size, count_step
from recipes_lib.planning.devices import Device, Measured, find_efficiency
from recipes_lib.planning.memory import Batch, count_kept, plan_memory
from recipes_lib.planning.memory_plan import ACTIVATIONS, Layout, MemoryPlan

NETWORK_BYTES: Final = 50e9
"""Bytes a second between machines, for each GPU: 400 Gbit/s."""
_GPUS_OF_A_MACHINE: Final = 8
_HOST_BYTES: Final = 25e9
"""Bytes a second between a GPU and its host, by PCIe 4."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of a run.

    Attributes:
        layout: Of a launch file.
        keys: What the recipe has to say.
        mode: Which layers are recomputed, in words.
        memory: Of one process on the GPU.
        fits: Whether the GPU holds that.
        seconds: Of an optimizer step.
    """

    layout: Layout
    keys: Mapping[str, Any]
    mode: str
    memory: MemoryPlan
    fits: bool
    seconds: float

    @property
    def num_rows(self) -> int:
        """Rows per micro-batch."""
        return int(self.keys["per_device_train_batch_size"])


def search(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    layouts: Sequence[Layout],
    num_rows: int,
    device: Device,
    peak: float,
    measured: Measured | None = None,
) -> list[Candidate]:
    """Return every configuration of an optimizer step of ``num_rows`` rows; fitting ones first, the fastest first.

    Args:
        config: The run; its micro-batch, accumulation, checkpointing and compilation are searched.
        model_config: Of the model that is trained.
        layouts: To choose from.
        num_rows: Rows of an optimizer step over all processes, which the method asks for; of a pair both are one.
        device: The GPU.
        peak: Its FLOP/s, for the products of the run.
        measured: As for ``find_efficiency``.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be had.
    """
    found = list[Candidate]()
    whole = {"per_device_train_batch_size": num_rows, "gradient_accumulation_steps": 1}
    num_flops = count_step(_change(config, whole), model_config, 1).num_flops
    size = compute_model_size(model_config).total
    for layout in layouts:
        if num_rows % layout.num_processes:
            continue
        rows = num_rows // layout.num_processes
        memory = plan_memory(_change(config, list_keys("none")), model_config, layout, device_bytes=device.memory)
        for number in (number for number in range(1, rows + 1) if rows % number == 0):
            batch = {"per_device_train_batch_size": number, "gradient_accumulation_steps": rows // number}
            sized = _change(config, batch)
            busy = _count_traffic_seconds(sized, size, layout, device)
            options = list(_list_modes(sized, model_config, memory, device))
            for keys, mode, placed in options:
                for compiles in (True, False):
                    all_keys = {**batch, **keys, "torch_compile": compiles}
                    share, _ = find_efficiency(_change(config, all_keys), measured)
                    seconds = 3600 * compute_hours(num_flops, _count_gpus(layout), peak, share)
                    # Communication overlaps with compute; host work does not.
                    seconds = max(seconds, busy[0]) + busy[1]
                    fits = placed.peak <= device.memory
                    found.append(Candidate(layout, all_keys, mode, placed, fits, seconds))
            if all(placed.peak > device.memory for _, _, placed in options):
                break  # Larger micro-batches need more memory.
    # Among equals, the larger micro-batch, which uses the GPU better; among those that do not fit, the nearest.
    found.sort(key=lambda one: (not one.fits, round(one.seconds, 3) if one.fits else one.memory.peak, -one.num_rows))
    return found


def _count_gpus(layout: Layout) -> int:
    return layout.num_processes * layout.tensor * layout.context


def _change(config: RecipeConfig, keys: Mapping[str, Any]) -> RecipeConfig:
    return dataclasses.replace(config, training={**config.training, **keys})


def _list_modes(
    config: RecipeConfig, model_config: PreTrainedConfig, memory: MemoryPlan, device: Device
) -> Iterator[tuple[dict[str, Any], str, MemoryPlan]]:
    """Yield the keys of each kind of checkpointing, its name, and the memory of a process."""
    layout, is_half = memory.layout, config.training.get("bf16") is not False
    kept = count_kept(config, layout.narrow(model_config), layout, is_half=is_half)
    num_predicted = 0 if config.recipe == "reward" else Batch.of(config, layout).num_targets
    for mode, (checkpointing, _) in MODES.items():
        components = {**memory.components, ACTIVATIONS: kept.count(checkpointing, layout.in_flight)}
        placed = dataclasses.replace(memory, components=components, num_predicted=num_predicted).place(device.memory)
        yield list_keys(mode), mode, placed


def _count_traffic_seconds(config: RecipeConfig, size: int, layout: Layout, device: Device) -> tuple[float, float]:
    """Seconds of an optimizer step on the links between GPUs, and to the host."""
    link = min(device.link, NETWORK_BYTES) if _count_gpus(layout) > _GPUS_OF_A_MACHINE else device.link
    sent, moved = count_traffic(config, size, layout)
    return sent / link if link else 0.0, moved / _HOST_BYTES


def count_traffic(config: RecipeConfig, num_parameters: int, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a GPU sends to others, and exchanges with its host, per optimizer step.

    Weights are gathered in 16 bits for both passes of a micro-batch. Gradients are reduced in 32 bits, by DDP once per
    step, by FSDP2 once per micro-batch. A frozen model under an adapter has none.

    Args:
        config: The run.
        num_parameters: Of the model.
        layout: Of its processes.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    micro_batches, number = config.read("gradient_accumulation_steps"), layout.num_processes
    gradients = 0 if config.adapter.use_peft else 4 * num_parameters
    if layout.shards.weights == 1:
        return (number - 1) / number * 2 * gradients, 0.0
    group = layout.shards.weights or number
    moved = 0.0 if layout.shards.weights else micro_batches * 2 * 4 * num_parameters / number
    return (group - 1) / group * micro_batches * (2 * 2 * num_parameters + gradients), moved

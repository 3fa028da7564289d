"""Plan search over layouts, micro-batches, activation checkpointing and compilation, for the fastest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.activations import AUTO, list_keys
from recipes_lib.planning.compute import compute_hours, compute_model_size, count_step
from recipes_lib.planning.devices import Device, Measured, find_efficiency
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import MARGIN, Layout, MemoryPlan
from recipes_lib.planning.timing import GPUS_OF_A_MACHINE, list_costs

HOST_MEMORY: Final = 2e12
"""Bytes of host memory of a machine: those of AWS p5 and DGX H100; layouts that offload more are no candidates."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of a run.

    Attributes:
        layout: Layout of the processes.
        keys: Keys that the recipe needs.
        memory: Memory plan of one process; its ``checkpointing`` is the kind of activation checkpointing.
        fits: Whether that fits the GPU.
        costs: Seconds of an optimizer step by cause.
        is_tight: Whether less than ``MARGIN`` of the GPU is free.
    """

    layout: Layout
    keys: Mapping[str, Any]
    memory: MemoryPlan
    fits: bool
    costs: Mapping[str, float]
    is_tight: bool = False

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
    size, held_out = compute_model_size(model_config).total, config.read("per_device_eval_batch_size")
    for layout in layouts:
        # The global batch size is fixed, so a layout that cannot divide it is left out.
        if num_rows % layout.num_processes:
            continue
        rows = num_rows // layout.num_processes
        for number in (number for number in range(1, rows + 1) if rows % number == 0):
            batch = {"per_device_train_batch_size": number, "gradient_accumulation_steps": rows // number}
            # Memory of evaluation is planned only where its batches sample answers: no larger than those of training.
            batch["per_device_eval_batch_size"] = held_out if config.distillation.lmbda else min(held_out, number)
            compiled = [choice for choice in (True, False) if is_supported(layout, {**batch, "torch_compile": choice})]
            if not compiled:
                continue
            sized = config.with_training({**batch, "activation_checkpointing": AUTO})
            memory = plan_memory(sized, model_config, layout, device_bytes=device.memory)
            if memory.host_bytes * min(GPUS_OF_A_MACHINE, layout.num_gpus) > HOST_MEMORY:
                break
            alone = (dataclasses.replace(memory, choices={mode: sizes}) for mode, sizes in memory.choices.items())
            plans = [plan.place(device.memory) for plan in alone]
            for plan in plans:
                for choice in compiled:
                    keys = {**batch, **list_keys(plan.checkpointing), "torch_compile": choice}
                    changed = config.with_training(keys)
                    share, _ = find_efficiency(changed, measured)
                    seconds = 3600 * compute_hours(num_flops, layout.num_gpus, device.flops, share)
                    costs = list_costs(changed, model_config, size, layout, device, seconds, share)
                    is_tight = plan.peak > (1 - MARGIN) * device.memory
                    found.append(Candidate(layout, keys, plan, plan.peak <= device.memory, costs, is_tight))
            if all(plan.peak > device.memory for plan in plans):
                break  # Larger micro-batches need more memory.
    found.sort(key=_rank)
    return found


def _rank(one: Candidate) -> tuple[bool, float, bool, bool, int, int]:
    """Sort key: fitting candidates first, by speed, then with a margin, less offload and groups, and larger batches.

    Candidates that do not fit are sorted by peak memory. One without a margin, which may run out of memory, must be
    faster than the others by as much.
    """
    groups, rows = one.layout.num_gpus // one.layout.num_processes, one.keys["per_device_train_batch_size"]
    seconds = one.seconds * (1 + MARGIN * one.is_tight)
    cost = float(f"{seconds:.3g}") if one.fits else one.memory.peak
    return not one.fits, cost, one.is_tight, not one.layout.shards.weights, groups, -rows

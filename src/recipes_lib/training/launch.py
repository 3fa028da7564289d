"""How this process was launched, read once from the environment, and whether the launch really happened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from recipes_lib.errors import ConfigError, Problem

_EXPECTED: Final = "RECIPES_LAUNCHED"
"""What ``recipes launch`` leaves for the processes to be held against: their number and the engine."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher (accelerate, torchrun, SLURM through either) told this process.

    Attributes:
        rank: Index of this process among all.
        local_rank: Index of this process on its machine.
        world_size: Number of processes.
        engine: ``FSDP``, ``DEEPSPEED`` or empty: the sharding that the launch file asked accelerate for.
        precision: ``mixed_precision`` of the launch file: ``no``, ``bf16``, ``fp16`` or ``fp8``.
    """

    rank: int
    local_rank: int
    world_size: int
    engine: str
    precision: str = "no"

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0


def read_launch() -> Launch:
    """Return what the launcher put into the environment; one process when there is none."""
    engine = ""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}:
        engine = "FSDP"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in {"1", "true"}:
        engine = "DEEPSPEED"
    return Launch(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        engine=engine,
        precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
    )


def read_environment() -> Mapping[str, str]:
    """Return the variables of this process."""
    return dict(os.environ)


def expect_launch(num_processes: int, engine: str) -> None:
    """Tell the processes that this one becomes or starts how many they should be, and what should shard them."""
    os.environ[_EXPECTED] = f"{num_processes} {engine}"


def verify_expected(launch: Launch) -> None:
    """Stop a process of a launch that became another one; before anything else, since it needs no other process.

    Raises:
        ConfigError: There are more or fewer processes than ``recipes launch`` asked for, or something else shards them.
    """
    if (expected := os.environ.get(_EXPECTED)) is None:
        return
    num_processes, _, engine = expected.partition(" ")
    if (int(num_processes), engine) != (launch.world_size, launch.engine):
        found = (
            f"{num_processes} processes under {engine or 'no sharding'} were asked for; this is one of "
            f"{launch.world_size} under {launch.engine or 'no sharding'}"
        )
        raise ConfigError(Problem("launch", found, "see whether all machines were started, with the same launch file"))


def verify_launch(launch: Launch, num_processes: int, distributed_type: str) -> None:
    """Stop a run that accelerate has silently turned into something else than what was launched.

    Args:
        launch: What the launcher asked for.
        num_processes: ``accelerate``'s number of processes, after its state exists.
        distributed_type: ``accelerate``'s ``DistributedType`` value, such as ``NO`` or ``MULTI_GPU``; FSDP on several
            GPUs is ``MULTI_GPU`` still.

    Raises:
        ConfigError: Fewer processes work together than were started, so that each would train a copy of its own.
        ConfigError: The launch file asked for FSDP or DeepSpeed and accelerate is running without it.
    """
    if num_processes != launch.world_size:
        raise ConfigError(
            Problem(
                "launch",
                f"{launch.world_size} processes were started but accelerate joined {num_processes}: "
                "each would train a model of its own",
                "on a machine without GPUs set use_cpu: true in the launch file and distributed_type: MULTI_GPU, "
                "or start with `torchrun --nproc_per_node N`",
            )
        )
    # accelerate makes FSDP of several accelerators, and of nothing else, once its Accelerator is built.
    becomes = "FSDP" if launch.engine == "FSDP" and distributed_type not in ("NO", "MULTI_CPU") else distributed_type
    if launch.engine and becomes != launch.engine:
        raise ConfigError(
            Problem(
                "launch",
                f"the launch file asks for {launch.engine} but accelerate is running {distributed_type}",
                "FSDP and DeepSpeed need an accelerator on every process; on CPUs use accelerate_configs/cpu_ddp.yaml",
            )
        )


def verify_engine(launch: Launch, distributed_type: str) -> None:
    """Stop a run that is not sharded by what it was launched with, now that accelerate has decided.

    Args:
        launch: What the launcher asked for.
        distributed_type: Of the finished ``Accelerator``.

    Raises:
        ConfigError: The launch file asked for FSDP or DeepSpeed and there is none, or the other way round.
    """
    engine = distributed_type if distributed_type in ("FSDP", "DEEPSPEED") else ""
    if engine != launch.engine:
        found = f"{launch.engine or 'no sharding'} was launched and accelerate is running {distributed_type}"
        raise ConfigError(Problem("launch", found, "start by `accelerate launch --config_file` and one of our files"))

"""How many machines a run has, and which of them this is: told by SLURM, by torchrun's variables, or by nobody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from recipes_lib.errors import ConfigError, Problem

PORT: Final = 29500
"""At which the machines meet, unless something else is said; torchrun's own."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a run.

    Attributes:
        num_machines: How many there are.
        machine_rank: Number of this one.
        main_process_ip: Name or address of machine 0; ``None`` where there is but one.
        main_process_port: At which it listens.
        told_by: Who says so, in words.
    """

    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int = PORT
    told_by: str = "one machine"


def find_machines(environment: Mapping[str, str]) -> Machines:
    """Return what the environment says of the machines of this run.

    Args:
        environment: Of the process that starts the others, on each machine.

    Raises:
        ConfigError: It is already one of the started processes, SLURM has not started it once on every node, or one of
            torchrun's variables is no number.
    """
    if "LOCAL_RANK" in environment:
        found = f"this is process {environment.get('RANK', environment['LOCAL_RANK'])} of a launch already"
        raise ConfigError(Problem("recipes launch", found, "start the recipe itself: `python recipes/sft.py ...`"))
    if "SLURM_JOB_ID" in environment:
        return _read_slurm(environment)
    if (num_machines := _read_number(environment, "PET_NNODES", 1)) > 1:
        return Machines(
            num_machines,
            _read_number(environment, "PET_NODE_RANK", 0),
            environment.get("PET_MASTER_ADDR", environment.get("MASTER_ADDR")),
            _read_number(environment, "PET_MASTER_PORT", _read_number(environment, "MASTER_PORT", PORT)),
            "torchrun's variables (PET_...)",
        )
    return Machines()


def find_first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: ``gpu-017`` of ``gpu-[017-020,031],login``."""
    name, _, rest = nodes.partition("[")
    if not rest or "," in name:
        return name.split(",")[0]
    first = re.split(r"[-,\]]", rest)[0]
    return f"{name}{first}{re.split(',', rest.partition(']')[2])[0]}"


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not re.fullmatch("[0-9]+", text):
        remedy = "write how many machines there are: a run has them all from its beginning to its end"
        remedy = remedy if name == "PET_NNODES" else "write a number, or unset it"
        raise ConfigError(Problem(name, f"{text!r} is no whole number", remedy))
    return int(text)


def _read_slurm(environment: Mapping[str, str]) -> Machines:
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_JOB_NUM_NODES", "1")))
    advice = "start it once on every node: `srun --ntasks-per-node=1 recipes launch ...`"
    if num_nodes > 1 and "SLURM_STEP_NUM_NODES" not in environment:
        raise ConfigError(Problem("recipes launch", f"SLURM gave {num_nodes} nodes, and this is one of them", advice))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        found = f"SLURM has started {tasks} tasks on a node, and each would start a process for every GPU"
        raise ConfigError(Problem("recipes launch", found, advice))
    if num_nodes == 1:
        return Machines(told_by="SLURM, one node")
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    return Machines(
        num_nodes,
        int(environment["SLURM_NODEID"]),
        find_first_host(nodes),
        # Two jobs may share a node.
        20000 + int(environment["SLURM_JOB_ID"]) % 10000,
        f"SLURM, {num_nodes} nodes",
    )

"""``recipes launch``: start a recipe on one or several machines; prints the command of accelerate and executes it."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes_lib import errors
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import choose_recipe, load_config
from recipes_lib.config.paths import RECIPES, find_launch_file, find_shipped
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import RECIPE_NAMES, TABLES
from recipes_lib.errors import STATUSES, ConfigError, Problem
from recipes_lib.quantities import pluralize
from recipes_lib.stopping import STOP_SIGNALS
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    add_pipeline_flags,
    expect_launch,
    name_pipeline,
    plan_launch,
    read_environment,
    read_launch_file,
    verify_accelerator,
)

PORT: Final = 29500
"""Default rendezvous port, as in torchrun."""
_COUNTS: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SKYPILOT_NUM_NODES")
"""Variables of PyTorchJobs without torchrun's, mpirun and SkyPilot: how many of this command they have started."""
_CAUSES: Final = STATUSES.keys() - {errors.EXIT_PREEMPTED}
"""Exit codes of the cause of a failure: a process has them neither because another one failed, nor after a signal."""


class Machines(NamedTuple):
    """The machines of a run.

    Attributes:
        num_machines: Number of machines.
        machine_rank: Rank of this machine, from 0.
        main_process_ip: Host name or address of machine 0; ``None`` for a single machine.
        main_process_port: Port of machine 0.
        source: Origin of the values, such as SLURM, for a message.
    """

    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int = PORT
    source: str = "one machine"


def find_machines(environment: Mapping[str, str]) -> Machines:
    """Return the machines of this run, from the environment variables of SLURM or torchrun.

    Args:
        environment: Environment variables of the launcher on this machine.

    Raises:
        ConfigError: This process is itself one of a launch, SLURM has not started one launcher per node, or a variable
            is not a number.
    """
    if "LOCAL_RANK" in environment:
        found = f"this is process {environment.get('RANK', environment['LOCAL_RANK'])} of an existing launch"
        raise ConfigError(Problem("recipes launch", found, "start the recipe itself: `python recipes/sft.py ...`"))
    if "SLURM_JOB_ID" in environment:
        return _read_slurm(environment)
    if (num_machines := _read_number(environment, "PET_NNODES", 1)) > 1:
        rank = _read_number(environment, "PET_NODE_RANK", 0)
        host = environment.get("PET_MASTER_ADDR", environment.get("MASTER_ADDR"))
        port = _read_number(environment, "PET_MASTER_PORT", _read_number(environment, "MASTER_PORT", PORT))
        return Machines(num_machines, rank, host, port, "torchrun's variables (PET_...)")
    return Machines()


def _verify_single_machine(environment: Mapping[str, str]) -> None:
    """Raise if there are more of this command, none of which knows the others."""
    # A launcher of one pod counts its processes in WORLD_SIZE.
    for name in _COUNTS if "PET_NNODES" not in environment else ():
        if (count := environment.get(name, "")).isdecimal() and int(count) > 1:
            found = f"is {count}: as many of this command have been started, and each would train a separate model"
            remedy = "write --num_machines, --machine_rank and --main_process_ip, or --num_machines 1 for one each"
            raise ConfigError(Problem(name, found, remedy))


def find_first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: ``gpu-017`` for ``gpu-[017-020,031],login``."""
    name, _, rest = nodes.partition("[")
    if not rest:
        return name.split(",")[0]
    first = re.split(r"[-,\]]", rest)[0]
    # Names of several dimensions have further brackets: rack[1-2]node[01-16].
    return find_first_host(f"{name}{first}{rest.partition(']')[2]}")


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not re.fullmatch("[0-9]+", text):
        remedy = "write a fixed number, or unset it: elastic launches are not supported"
        raise ConfigError(Problem(name, f"{text!r} is not a whole number", remedy))
    return int(text)


def _read_slurm(environment: Mapping[str, str]) -> Machines:
    num_nodes = _read_number(environment, "SLURM_STEP_NUM_NODES", _read_number(environment, "SLURM_JOB_NUM_NODES", 1))
    remedy = "start it once on every node: `srun --ntasks-per-node=1 recipes launch ...`"
    # Without variables of a step, this is the batch script or `salloc`, which runs on the first node alone.
    if num_nodes > 1 and "SLURM_STEP_NUM_NODES" not in environment:
        found = f"the SLURM job has {num_nodes} nodes, and this starts processes on one of them"
        raise ConfigError(Problem("recipes launch", found, remedy))
    # "1", or "1(x4)" for four nodes.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        found = f"SLURM has started {tasks} tasks on a node, and each would start one process per GPU"
        raise ConfigError(Problem("recipes launch", found, remedy))
    # Derived from the job id, because two jobs may share a node.
    port = 20000 + _read_number(environment, "SLURM_JOB_ID", 0) % 10000
    if num_nodes == 1:
        return Machines(main_process_port=port, source="SLURM, one node")
    host = find_first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    rank = _read_number(environment, "SLURM_NODEID", 0)
    return Machines(num_nodes, rank, host, port, f"SLURM, {num_nodes} nodes")


def main(argv: Sequence[str]) -> int:
    """Run the command: compose the command of accelerate, print it, and replace this process by it.

    Raises:
        ConfigError: The configuration is invalid; the launch file or pipeline schedule does not exist, is incompatible
            with the recipe, is for one process instead of several, or needs GPUs that this machine lacks; or the
            address of machine 0 is unknown. As ``verify_accelerator`` and ``verify_fp8``, except for a dry run.
    """
    parser = CommandParser("launch")
    add_pipeline_flags(parser)
    options, overrides = parser.parse_known_args(argv)
    recipe = find_recipe_name(options.recipe, options.config)
    named = ["--config", options.config, *overrides] if options.config else overrides
    # Checked once here, instead of by every process that would be started.
    config = load_config(recipe, named)
    machines = _resolve_machines(options, find_machines(read_environment()))
    file, document = _read_hardware(options, machines)
    port = options.main_process_port or document.get("main_process_port")
    if machines.main_process_port == PORT and isinstance(port, int):
        machines = machines._replace(main_process_port=port)
    given = options.num_processes
    num_processes = _count_processes(file, document, machines, options.dry_run) if given is None else given
    if num_processes % machines.num_machines:
        found = f"{num_processes} processes cannot be divided equally among {machines.num_machines} machines"
        raise ConfigError(Problem("--num_processes", found, "write a multiple of the number of machines"))
    pipeline = name_pipeline(options.pipeline_stages, options.pipeline_schedule)
    launch = plan_launch(file, num_processes, pipeline)
    verify_combination(config, launch, str(file))
    if not options.dry_run and not launch.layout.uses_cpu:
        _verify_gpus(config, launch, launch.world_size // machines.num_machines)
    command = compose(file, [str(find_shipped(RECIPES / f"{recipe}.py")), *named], machines, launch)
    variables = [f"{name}={value}" for name, value in pipeline.items()] if options.pipeline_stages > 1 else []
    line = shlex.join([*variables, *command])
    number = pluralize(num_processes, "process")
    where = f"{machines.main_process_ip}:{machines.main_process_port}"
    meeting = f", which wait for each other at {where}" if machines.num_machines > 1 else ""
    sys.stderr.write(f"{machines.source}, {number} by {file}{meeting}:\n{line}\n")
    if not options.dry_run:
        if launch.precision == "fp8":
            # Not at module level: it imports transformers. The recipe would call it after accelerate's own traceback.
            from recipes_lib.training.trainers.arguments import verify_fp8

            verify_fp8(launch.precision)
        expect_launch(launch)
        _execute(command, is_alone=document["distributed_type"] == "NO")
    return errors.EXIT_DONE


def _read_hardware(options: argparse.Namespace, machines: Machines) -> tuple[Path, dict[str, Any]]:
    """Return path and contents of the launch file of --hardware, else of the default one.

    Raises:
        ConfigError: It does not exist or is invalid, or is for several machines, and nothing else names them.
    """
    num_needed = max(machines.num_machines, options.num_processes or 1)
    file = find_launch_file(options.hardware or choose_for_this_machine(num_needed))
    document = read_launch_file(file)
    count = document.get("num_machines", 1)
    if machines.num_machines == 1 < count and options.num_machines is None:
        found = f"{file} is for {count} machines: each would train a separate model"
        remedy = "write --num_machines, --machine_rank and --main_process_ip, or --num_machines 1"
        raise ConfigError(Problem("--num_machines", found, remedy))
    return file, document


def _verify_gpus(config: RecipeConfig, launch: Launch, num_here: int) -> None:
    """Raise if this machine lacks GPUs for its ``num_here`` processes, before all of them import torch."""
    from recipes_lib.hardware import count_accelerators

    num_gpus = count_accelerators()
    verify_accelerator(launch, is_available=num_gpus > 0)
    if 0 < num_gpus < num_here and not config.training.get("use_cpu"):
        found = f"{num_here} processes on this machine, where torch finds {pluralize(num_gpus, 'GPU')}"
        raise ConfigError(Problem("--num_processes", found, "omit it for one process per GPU (CUDA_VISIBLE_DEVICES)"))


def find_recipe_name(recipe: str | None, config: str | None) -> str:
    """Return the recipe of a command that trains, as ``choose_recipe``.

    Raises:
        ConfigError: There is no such recipe, or it does not train and has a command of its own.
    """
    chosen = choose_recipe(recipe, config, TABLES)
    if chosen not in RECIPE_NAMES:
        command = {"corpus": "clean"}.get(chosen, chosen)
        remedy = f"run `recipes {command}`, or write --recipe sft"
        raise ConfigError(Problem("--config", f"is for {chosen}, which does not train", remedy))
    return chosen


def _execute(command: Sequence[str], *, is_alone: bool) -> None:
    """Replace this process by the command of accelerate, or by its only process with the same environment.

    accelerate 1.15 waits for a single process, prints a traceback of its own if it fails, and turns every exit code
    other than 0 into 1.
    """
    sys.stderr.flush()
    arguments = command[command.index("launch") + 1 :]
    if not is_alone:
        os.execv(sys.executable, [sys.executable, "-P", "-m", __name__, *arguments])
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    recipe, environment = prepare_simple_launcher_cmd_env(options)
    os.execve(recipe[0], recipe, environment)


def run_processes(arguments: Sequence[str]) -> int:
    """Run ``accelerate launch`` in this process; return the exit code of the process that caused a failure.

    accelerate 1.15 would print torch's traceback below the error of the process, and return 1 for every failure.

    Args:
        arguments: Command line after ``accelerate launch``.

    Returns:
        ``EXIT_PREEMPTED`` if this process was signalled; 128 plus the signal number if one has ended the other process;
        ``EXIT_BUG`` if not all machines have started, as for a lost process; ``EXIT_USER`` if the port is in use.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_news)
    options = launch_command_parser().parse_args(list(arguments))
    try:
        launch_command(options)
    except SignalException:  # The processes have received the signal too, and had time to save.
        for number in STOP_SIGNALS:  # A further Ctrl-C would replace the exit code of this process, which is ending.
            signal.signal(number, signal.SIG_IGN)
        return errors.EXIT_PREEMPTED
    except ConnectionError:  # accelerate 1.15 has found the port of machine 0 in use.
        found, remedy = f"another process uses port {options.main_process_port}", "write another one, on every machine"
        sys.stderr.write(f"{Problem('--main_process_port', found, remedy)}\n")
        return errors.EXIT_USER
    except DistError as error:
        found = f"not all machines came to {options.main_process_ip}:{options.main_process_port}: {error}"
        remedy = "start the same command on each, with its own --machine_rank, and open this port of machine 0"
        sys.stderr.write(f"{Problem('recipes launch', found, remedy)}\n")
        return errors.EXIT_BUG
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            # The launcher ends the others by SIGTERM.
            if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
                name = signal.Signals(-failure.exitcode).name
                sys.stderr.write(f"rank {rank} (process {failure.pid}) was ended by {name}\n")
        # One that has lost another rank ends by ``EXIT_BUG``, possibly in the same moment as that rank.
        cause = min(failed.failures.values(), key=lambda one: (one.exitcode not in _CAUSES, one.timestamp))
        return errors.translate_exit_code(cause.exitcode)
    return errors.EXIT_DONE


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record of torch's launcher says more than the error of a process or our line of its signal."""
    known = (f"failed (exitcode: {code}" for code in ("-", *(f"{code})" for code in (errors.EXIT_BUG, *STATUSES))))
    return not record.getMessage().startswith(("Sending process ", *known))


def compose(file: Path, script: Sequence[str], machines: Machines, launch: Launch) -> list[str]:
    """Return the command of accelerate; ``--config_file`` keeps it from reading the user's ``default_config.yaml``."""
    command = [sys.executable, "-P", "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(file)]
    command += ["--num_processes", str(launch.world_size), "--num_machines", str(machines.num_machines)]
    if machines.num_machines > 1:
        command += ["--machine_rank", str(machines.machine_rank)]
        command += ["--main_process_ip", str(machines.main_process_ip)]
        if launch.engine == "DEEPSPEED":
            # By default, DeepSpeed's launcher on each machine starts the processes of all machines, by ssh.
            command += ["--deepspeed_multinode_launcher", "standard"]
    if launch.world_size > 1:
        command += ["--main_process_port", str(machines.main_process_port)]
    return [*command, *script]


def _resolve_machines(options: argparse.Namespace, detected: Machines) -> Machines:
    """Return the detected machines, with the values of the flags.

    Raises:
        ConfigError: Several machines without --machine_rank and --main_process_ip, or a rank out of range; or another
            program has started this command on several, without --num_machines.
    """
    names = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "num_machines" in given:
        given["source"] = f"{pluralize(given['num_machines'], 'machine')} (flags)"
    elif detected == Machines():
        _verify_single_machine(read_environment())
    machines = detected._replace(**given)
    # The default rank 0 is not detected: without the flag, every machine would take itself for the first.
    lacks_rank = "num_machines" in given and detected.num_machines == 1 and "machine_rank" not in given
    if machines.num_machines > 1 and (not machines.main_process_ip or lacks_rank):
        found = f"there are {machines.num_machines} machines, without --machine_rank and --main_process_ip"
        raise ConfigError(Problem("--num_machines", found, "write both, or start under SLURM"))
    if not 0 <= machines.machine_rank < machines.num_machines:
        found = f"is {machines.machine_rank}, with {machines.num_machines} machines"
        raise ConfigError(Problem("--machine_rank", found, "write the rank of this machine, from 0"))
    return machines


def choose_for_this_machine(num_processes: int = 1) -> str:
    """Return the name of the default launch file for at least ``num_processes``, on machines such as this one.

    Warns if torch cannot use the GPU of this machine: the launch file for CPUs would hide it.
    """
    from recipes_lib.hardware import INSTALL_CUDA, count_accelerators, find_gpu_obstacle

    if obstacle := find_gpu_obstacle(read_environment()):
        sys.stderr.write(f"warning: CPUs are used, for torch cannot use the GPU: {obstacle}; {INSTALL_CUDA}\n")
    one, several = {0: ("cpu", "cpu_ddp"), 1: ("single_gpu", "ddp")}.get(count_accelerators(), ("ddp", "ddp"))
    return one if num_processes == 1 else several


def _count_processes(file: Path, document: dict[str, Any], machines: Machines, is_dry_run: bool) -> int:
    """Return the default number of processes: one per GPU (of ``gpu_ids``), or that of a file for CPUs, or one.

    Raises:
        ConfigError: The launch file needs GPUs, this machine has none, and it is to start them.
    """
    if document["distributed_type"] == "NO":
        return machines.num_machines
    if document.get("use_cpu"):
        return int(document.get("num_processes", 1))
    from recipes_lib.hardware import count_accelerators

    here, ids = count_accelerators(), str(document.get("gpu_ids") or "all")
    if not here and is_dry_run:  # The command is for a machine that has the GPUs of the file.
        return int(document.get("num_processes", 1)) * machines.num_machines // int(document.get("num_machines", 1))
    if not here:
        found = f"{file} needs GPUs, and this machine has none"
        remedy = "write --hardware cpu or cpu_ddp, or start on a machine with GPUs"
        raise ConfigError(Problem("--hardware", found, remedy))
    return (here if ids == "all" else min(here, len(ids.split(",")))) * machines.num_machines


if __name__ == "__main__":
    try:
        sys.exit(run_processes(sys.argv[1:]))
    except KeyboardInterrupt:  # While torch is imported; later, torch raises ``SignalException``.
        sys.exit(errors.EXIT_INTERRUPTED)

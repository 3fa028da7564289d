"""Processes of a launch, forked from one that has imported the packages of others: most of what a short run costs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "datasets",
    "evaluate",
    "peft",
    "scipy.stats",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.sft_trainer",
)
"""None of this project, whose state belongs to a process, nor DeepSpeed, which looks for its hardware when imported."""
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(list(PACKAGES))


def run_forked(
    module: str,
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    num_processes: int | None = 2,
    timeout: float = 600,
) -> str:
    """Run a module as the processes of a launch, to its good end, and return what they told.

    Args:
        module: Run as ``python -m`` would.
        arguments: Of its command line.
        variables: Of the environment, besides those of torch's launcher.
        num_processes: Of the launch; ``None`` is one, by itself.
        timeout: Seconds after which they are killed.
    """
    common = os.environ | dict(variables or {})
    environments = [{}] if num_processes is None else name_processes(num_processes)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        processes = [
            FORKING.Process(
                target=_become,
                args=(module, list(map(str, arguments)), common | environment, output.name),
            )
            for environment in environments
        ]
        try:
            for process in processes:
                process.start()
            alive: list[Any] = processes
            while alive and not any(process.exitcode for process in processes):
                if not connection.wait([process.sentinel for process in alive], timeout):
                    break
                alive = [process for process in alive if process.exitcode is None]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        told = output.read()
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"the processes ended with {codes}:\n{told[-8000:]}"
    return told


def name_processes(num_processes: int) -> list[dict[str, str]]:
    """Return the variables by which processes of one launch on this machine find each other."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "OMP_NUM_THREADS": "1"}
    common |= {name: str(num_processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return [common | {name: str(rank) for name in ("RANK", "LOCAL_RANK")} for rank in range(num_processes)]


def find_free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _become(module: str, arguments: list[str], environment: Mapping[str, str], output: str) -> None:
    """Run a module as this process's own."""
    import torch

    sink = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # It is read when torch is loaded.
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

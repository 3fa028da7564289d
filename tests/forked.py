"""Processes of a launch, forked from one that has imported the packages of others: most of what a short run costs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
                args=(module, list(map(str, arguments)), common | environment, [output.name] * 2),
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


def run_script(
    script: Path, *arguments: object, paths: Sequence[Path] = (), timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python SCRIPT`` would, in a process of its own, and return its end and what it told.

    Args:
        script: Run as the main module.
        arguments: Of its command line.
        paths: Where modules are looked for besides.
        timeout: Seconds after which it is killed; its exit code is then negative.
    """
    arguments = tuple(map(str, arguments))
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as error:
        files = (out.name, error.name)
        process = FORKING.Process(
            target=_become, args=(script, arguments, dict(os.environ), files, [str(path) for path in paths])
        )
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        told = [Path(name).read_text(encoding="utf-8", errors="replace") for name in files]
    assert process.exitcode is not None
    return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, *told)


def spare_flushes() -> None:
    """Have files not wait for the disk: what survives a power cut no test can see, and flushing takes half of a run.

    That files are flushed, and in which order, is seen by who replaces ``os.fsync``.
    """
    os.fsync = lambda fd: None


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


def _become(
    module: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[str],
    paths: Sequence[str] = (),
) -> None:
    """Run a module, or a script, as this process's own; what it tells goes to two files."""
    import torch

    spare_flushes()
    gc.freeze()  # What is imported is left out of collections: upstream's trainer makes a full one at its end.
    for stream, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # It is read when torch is loaded.
    sys.argv = [str(module), *arguments]
    if isinstance(module, Path):
        sys.path[:0] = [str(module.parent), *paths]
        runpy.run_path(str(module), run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)

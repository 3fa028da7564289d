"""Processes of a launch, forked from one that has imported the packages of others: most of what a short run costs."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "datasets",
    "evaluate",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
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


class Launch:
    """The processes of a launch, as ``subprocess.Popen`` has the one that it starts.

    Args:
        main: A module, run as ``python -m`` would, or a script.
        arguments: Of its command line.
        variables: Of the environment, besides those of torch's launcher.
        num_processes: Of the launch; ``None`` is one, by itself.
        paths: Where modules are looked for besides.
    """

    def __init__(
        self,
        main: str | Path,
        *arguments: object,
        variables: Mapping[str, str] | None = None,
        num_processes: int | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        self._args = [str(main), *map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "error")]
        for file in self._files:
            file.touch()
        common = os.environ | dict(variables or {})
        environments = [{}] if num_processes is None else name_processes(num_processes)
        self.processes = [
            FORKING.Process(target=_become, args=(main, self._args, common | own, self._files, list(map(str, paths))))
            for own in environments
        ]
        for process in self.processes:
            process.start()

    @property
    def pid(self) -> int:
        """The number of the first process."""
        return int(self.processes[0].pid or 0)

    def poll(self) -> int | None:
        """Return the exit code of the first process; ``None`` while it runs."""
        return self.processes[0].exitcode

    def send_signal(self, number: int) -> None:
        """Send the first process a signal, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait until all have ended, or one has failed or the time is up, which kills the others.

        Args:
            timeout: Seconds without the end of a process.
        """
        alive, codes = self.processes, []
        while alive and not any(codes) and connection.wait([process.sentinel for process in alive], timeout):
            alive = [process for process in alive if process.exitcode is None]
            codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        codes += [process.exitcode for process in self.processes]  # A failure of its own comes before a kill.
        told = [file.read_text(encoding="utf-8", errors="replace") for file in self._files]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._args, next(filter(None, codes), 0), *told)


@atexit.register
def _end_those_left() -> None:
    """Kill what a failed test has left running, for which Python would wait."""
    for process in multiprocessing.active_children():
        process.kill()


def run_script(script: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python SCRIPT`` would, with the options of ``Launch``, and return its end and what it told."""
    return Launch(script, *arguments, **options).finish()


def run_forked(module: str, *arguments: object, num_processes: int | None = 2, **options: Any) -> str:
    """Run a module as the processes of a launch, to its good end, and return what they told."""
    done = Launch(module, *arguments, num_processes=num_processes, **options).finish(600)
    assert not done.returncode, f"it ended with {done.returncode}:\n{(done.stdout + done.stderr)[-8000:]}"
    return done.stdout + done.stderr


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
    main: str | Path,
    args: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    paths: Sequence[str],
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
    sys.argv = list(args)
    if isinstance(main, Path):
        sys.path[:0] = [str(main.parent), *paths]
        runpy.run_path(str(main), run_name="__main__")
    else:
        runpy.run_module(main, run_name="__main__", alter_sys=True)

"""Launches whose processes are forked from a server that has imported torch, transformers and the other packages.

Imports take most of the time of a short run.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from recipes_lib import hardware

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "datasets",
    "evaluate",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "peft",
    "pytest",
    "recipes_lib.publish.final_model",
    "recipes_lib.rl.trainer",
    "recipes_lib.training.evaluation.build",
    "recipes_lib.training.layouts.pipeline_schedule",
    "recipes_lib.training.trainers.dpo_trainer",
    "scipy.stats",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.sft_trainer",
)
"""Preloaded by the fork server; not DeepSpeed, which probes hardware."""
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(list(PACKAGES))
_RESERVED: list[socket.socket] = []
"""Sockets of ``find_free_port``, open until this process ends."""


class Launch:
    """Processes of one launch, with the interface of ``subprocess.Popen`` for the first of them.

    Args:
        main: A module, run as by ``python -m``, or the path of a script.
        arguments: Command-line arguments.
        variables: Environment variables, in addition to those of torch's launcher.
        num_processes: World size; ``None`` starts one process without a launcher's variables.
        paths: Further entries of ``sys.path``.
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
        """Process id of the first process."""
        return int(self.processes[0].pid or 0)

    def poll(self) -> int | None:
        """Return the exit code of the first process, or ``None`` while it runs."""
        return self.processes[0].exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait until all processes have ended; kill the others when one fails or the time is up.

        Args:
            timeout: Seconds in which at least one process must end.
        """
        alive, codes = self.processes, []
        while alive and not any(codes) and connection.wait([process.sentinel for process in alive], timeout):
            alive = [process for process in alive if process.exitcode is None]
            codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        if not any(codes):  # The first failure precedes the kills.
            codes = [process.exitcode for process in self.processes]
        output = [file.read_text(encoding="utf-8", errors="replace") for file in self._files]
        self._folder.cleanup()
        # The peers of a killed process may have failed, too, before it is noticed: its negative code is the cause.
        code = min(filter(None, codes), key=lambda code: code > 0, default=0)
        return subprocess.CompletedProcess(self._args, code, *output)


@atexit.register
def _kill_remaining() -> None:
    """Kill processes that a failed test left running: Python would wait for them at exit."""
    for process in multiprocessing.active_children():
        process.kill()


def run_script(script: Path, *arguments: object, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python SCRIPT`` does, assert its exit code, and return its output.

    Args:
        script: Path of the script.
        arguments: Its arguments; a mapping is flags ``--name=value``.
        code: Expected exit code.
        options: Of ``Launch``.
    """
    words = [word for given in arguments for word in (_spell(given) if isinstance(given, Mapping) else [given])]
    done = Launch(script, *words, **options).finish()
    assert done.returncode == code, (done.stdout + done.stderr)[-8000:]
    return done


def _spell(keys: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in keys.items()]


def run_python(source: str, *arguments: object) -> str:
    """Run Python code in a new process, which has imported nothing; assert that it succeeds, return its output."""
    done = subprocess.run([sys.executable, "-c", source, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_forked(module: str, *arguments: object, num_processes: int | None = 2, **options: Any) -> str:
    """Run a module in the processes of a launch, assert that all succeed, and return their output."""
    done = Launch(module, *arguments, num_processes=num_processes, **options).finish(600)
    assert not done.returncode, f"it ended with {done.returncode}:\n{(done.stdout + done.stderr)[-8000:]}"
    return done.stdout + done.stderr


def limit_forked() -> None:
    """Let this process, which a test has forked and waits for, end by SIGALRM with its stacks if it hangs.

    For example by a lock that another thread of the test's process held at the fork.
    """
    # Not ``dump_traceback_later``: after a fork it waits for the thread of that of pytest, which a child lacks.
    faulthandler.register(signal.SIGALRM, file=2, chain=True)
    signal.alarm(300)


def spare_flushes() -> None:
    """Replace ``os.fsync`` by a no-op: no test can observe a power failure, and flushing takes half of a short run.

    Tests of flushing and its order replace ``os.fsync`` themselves.
    """
    os.fsync = lambda fd: None


def shorten_measurements() -> None:
    """Measure the peak FLOP/s of the CPU by a small matrix product: no test can depend on its value."""
    hardware.measure_matmul_flops.__defaults__ = (128, 1)


def name_processes(num_processes: int) -> list[dict[str, str]]:
    """Return the environment variables of torch's launcher for each rank of a launch on this machine."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "OMP_NUM_THREADS": "1"}
    common |= {name: str(num_processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return [common | {name: str(rank) for name in ("RANK", "LOCAL_RANK")} for rank in range(num_processes)]


def find_free_port() -> int:
    """Return an unused port, which the system gives to no other process until this one ends."""
    reserving = socket.socket()
    # With this option, as servers set it, too, a server may bind the port as well, because this socket does not listen.
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("127.0.0.1", 0))
    _RESERVED.append(reserving)
    port: int = reserving.getsockname()[1]
    return port


def _become(
    main: str | Path, args: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Path], paths: Sequence[str]
) -> None:
    """Run a module or script in this forked process, with stdout and stderr redirected to two files."""
    import torch

    from recipes_lib.stopping import STOP

    STOP._parent = os.getppid()  # Read when the module was imported, in the server.
    spare_flushes()
    shorten_measurements()
    gc.freeze()  # As in tests/conftest.py: full collections at the end of a run skip imported modules.
    for stream, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has read the server's value.
    sys.argv = list(args)
    if isinstance(main, Path):
        sys.path[:0] = [str(main.parent), *paths]
        runpy.run_path(str(main), run_name="__main__")
    else:
        runpy.run_module(main, run_name="__main__", alter_sys=True)

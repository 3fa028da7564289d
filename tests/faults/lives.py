"""Recipes in forked processes, which share the imported packages, so that a run has no start-up time."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import ROOT, name_processes

from recipes_lib.stopping import STOP

SECONDS = 180
"""Seconds after which a run counts as hanging."""
SECONDS_TO_FOLLOW = 60
"""Seconds within which the other ranks must end after one has ended."""

Fault = Callable[[], None]
"""Function that is called in the forked process before the recipe, and installs a fault."""


@dataclass(frozen=True)
class Outcome:
    """How the processes of one command ended.

    Attributes:
        codes: Exit code of each rank; minus the signal number if it was killed; ``None`` if it hung.
        output: Standard output and error of all ranks.
        seconds: Time from the first exit to the last.
    """

    codes: tuple[int | None, ...]
    output: str
    seconds: float


def run_processes(
    recipe: str,
    keys: Mapping[str, Any],
    *,
    output: Path,
    faults: Mapping[int, Fault] | None = None,
    num_processes: int = 1,
) -> Outcome:
    """Run a recipe on several ranks as a launcher does: when one fails, the others get SIGTERM.

    Args:
        recipe: Key of ``recipe_runs.OF_RECIPE``: a recipe, and after a space its variant.
        keys: Configuration keys, passed as flags.
        output: Folder for what the processes write.
        faults: Faults by rank.
        num_processes: Number of ranks, all on this machine.
    """
    return wait_for_processes(
        start_processes(recipe, keys, output=output, faults=faults, num_processes=num_processes), output
    )


def start_processes(
    recipe: str,
    keys: Mapping[str, Any],
    *,
    output: Path,
    faults: Mapping[int, Fault] | None = None,
    num_processes: int = 1,
) -> list[int]:
    """Start the processes of ``run_processes`` and return their ids."""
    output.mkdir(parents=True, exist_ok=True)
    arguments = [f"--{name}={value}" for name, value in keys.items()]
    pids = []
    for rank, own in enumerate(name_processes(num_processes) if num_processes > 1 else [{}]):
        if own:
            (output / str(rank)).mkdir(exist_ok=True)
            own["TORCHELASTIC_ERROR_FILE"] = str(output / str(rank) / "error.json")
        pids.append(_fork(recipe, arguments, own, output / f"output-{rank}", (faults or {}).get(rank)))
    return pids


def wait_for_processes(pids: list[int], output: Path) -> Outcome:
    """Wait for all processes; when one fails, send SIGTERM to the others, and abort those that hang."""
    codes: dict[int, int | None] = {}
    deadline, first = time.monotonic() + SECONDS, 0.0
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            codes[pid] = os.waitstatus_to_exitcode(status)
            if not first:
                first = time.monotonic()
                deadline = min(deadline, first + SECONDS_TO_FOLLOW)
            if codes[pid]:
                _signal(set(pids) - set(codes), signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                _signal({pid}, signal.SIGABRT)  # ``faulthandler`` prints the stacks.
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    text = "".join((output / f"output-{rank}").read_text(errors="replace") for rank in range(len(pids)))
    return Outcome(tuple(codes[pid] for pid in pids), text, time.monotonic() - first)


def _fork(recipe: str, arguments: list[str], environment: dict[str, str], output: Path, fault: Fault | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; ``kill_in_next_write_beyond`` needs it.
        faulthandler.enable(file=2, all_threads=True)
        os.chdir(ROOT)
        STOP._parent = os.getppid()  # Read when the module was imported.
        sys.argv = [str(ROOT / "recipes" / f"{recipe.split()[0]}.py"), *arguments]
        if fault is not None:
            fault()
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)

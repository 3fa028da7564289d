"""Recipes run to their ends in forked processes: what is imported once is there in each, and a life costs no start."""

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
"""After which a life that has not ended counts as hanging."""
SECONDS_TO_FOLLOW = 60
"""Within which the other processes must have ended when one has died."""

Fault = Callable[[], None]
"""Is called in the forked process before the recipe, and arranges what will happen."""


@dataclass(frozen=True)
class Life:
    """How the processes of one command ended.

    Attributes:
        codes: Exit code of each rank; the negative number of the signal that killed it; ``None``: it hung.
        told: What they wrote to standard output and error.
        seconds: From the first end to the last.
    """

    codes: tuple[int | None, ...]
    told: str
    seconds: float


def live(
    recipe: str,
    keys: Mapping[str, Any],
    *,
    told: Path,
    faults: Mapping[int, Fault] | None = None,
    num_processes: int = 1,
) -> Life:
    """Run a recipe in as many processes as asked, as a launcher does: when one fails, the others are told to end.

    Args:
        recipe: Recipe, and after a space what tells two runs of it apart.
        keys: Of the configuration, as flags.
        told: Folder for what the processes write.
        faults: By the rank that they happen on.
        num_processes: Ranks, all on this machine.
    """
    return wait(begin(recipe, keys, told=told, faults=faults, num_processes=num_processes), told)


def begin(
    recipe: str,
    keys: Mapping[str, Any],
    *,
    told: Path,
    faults: Mapping[int, Fault] | None = None,
    num_processes: int = 1,
) -> list[int]:
    """Start the processes of ``live`` and return their numbers."""
    told.mkdir(parents=True, exist_ok=True)
    arguments = [f"--{name}={value}" for name, value in keys.items()]
    pids = []
    for rank, own in enumerate(name_processes(num_processes) if num_processes > 1 else [{}]):
        if own:
            (told / str(rank)).mkdir(exist_ok=True)
            own["TORCHELASTIC_ERROR_FILE"] = str(told / str(rank) / "error.json")
        pids.append(_fork(recipe, arguments, own, told / f"told-{rank}", (faults or {}).get(rank)))
    return pids


def wait(pids: list[int], told: Path) -> Life:
    """Wait until all have ended; when one has failed, send the others what a launcher sends, and kill who hangs."""
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
                _signal({pid}, signal.SIGABRT)  # ``faulthandler`` tells where it hangs.
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    words = "".join((told / f"told-{rank}").read_text(errors="replace") for rank in range(len(pids)))
    return Life(tuple(codes[pid] for pid in pids), words, time.monotonic() - first)


def _fork(recipe: str, arguments: list[str], environment: dict[str, str], told: Path, fault: Fault | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and no fault could end a process by it.
        faulthandler.enable(file=2, all_threads=True)
        os.chdir(ROOT)
        STOP._parent = os.getppid()  # It was read when the module was imported.
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

"""Processes of a bench: exit codes, output, time limit."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes_lib.proving.bench import Bench, WrongResultError, launch


def test_launch_returns_exit_code_and_writes_output(tmp_path: Path) -> None:
    code = "import os; print(os.environ['WORD'], flush=True); os.write(2, b'bad'); raise SystemExit(3)"
    assert launch(["-c", code], {"WORD": "so"}, tmp_path / "x") == 3
    assert (tmp_path / "x").read_text() == "so\nbad"


def test_time_limit_sends_sigterm_before_sigkill(tmp_path: Path, monkeypatch) -> None:
    """The handler of a launcher ends its workers, which a kill would leave running."""
    os.mkfifo(tmp_path / "ready")
    clean_up = (
        "import pathlib, signal, sys, threading\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'ended').touch(), sys.exit()))\n"
        "(folder / 'ready').write_text('')\n"
        "threading.Event().wait()"
    )

    def wait(process: Any, limit: float | None = None, wait=subprocess.Popen.wait) -> int:
        if limit == 3:  # Over as soon as the handler is installed.
            (tmp_path / "ready").read_text()
        return wait(process, 0 if limit == 3 else limit)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(WrongResultError, match="did not end within"):
        launch(["-c", clean_up, str(tmp_path)], {}, tmp_path / "x", limit=3)
    assert (tmp_path / "ended").exists()


def test_measured_seconds_are_the_median_after_three_calls(tmp_path: Path, monkeypatch) -> None:
    ends = itertools.accumulate([9, 9, 9, 1, 6, 2], initial=0)
    now = [next(ends)]
    monkeypatch.setattr("recipes_lib.proving.bench.time", SimpleNamespace(perf_counter=lambda: now[0]))
    bench = Bench(tmp_path, torch.device("cpu"), is_small=True)
    assert bench.measure_seconds(lambda: now.insert(0, next(ends)), repeats=3) == 2


def test_signal_ends_the_processes_of_threads(tmp_path: Path, monkeypatch) -> None:
    def stop(*_: Any) -> None:
        raise InterruptedError

    def run(_: int) -> None:
        codes.append(launch(["-c", code], {}, tmp_path / "x", limit=60))

    code = "import os, signal; os.kill(os.getppid(), signal.SIGUSR1); signal.pause()"
    codes: list[int] = []
    monkeypatch.setattr(Bench, "write_inputs", lambda self: None)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(InterruptedError):
            Bench(tmp_path, torch.device("cpu"), is_small=True).map_runs(run, range(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes == [-signal.SIGTERM]

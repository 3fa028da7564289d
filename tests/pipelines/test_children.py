"""Processes of stages: their labels, and signals at their start."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from recipes_lib.errors import EXIT_PREEMPTED, ConfigError
from recipes_lib.pipelines.children import Children


def test_sigterm_during_start_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, previous = subprocess.Popen, signal.signal(signal.SIGTERM, lambda *_: pytest.fail("not forwarded"))

    def start(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    children = Children()
    try:
        children.start("a", ["sleep", "60"], {})
        assert children.wait() == ("a", EXIT_PREEMPTED)
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_script_without_interpreter_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo")
    script.chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match=r"script: cannot be started: Exec format error\n    name its interpreter"):
        Children().start("a", [str(script)], {})
    with pytest.raises(ConfigError, match="cannot be started: embedded null byte"):
        Children().start("a", ["echo", "\0"], {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_of_processes_are_labelled(capfd: pytest.CaptureFixture[str]) -> None:
    children = Children(is_labelled=True)
    children.start("a", ["sh", "-c", "echo one; printf '1\\r2\\n' >&2; printf '\\377'"], {})
    assert children.wait() == ("a", 0)
    assert capfd.readouterr().out == "a | one\na | 2\na | \ufffd\n"


def test_process_left_behind_holds_neither_its_stage_nor_the_exit(capfd: pytest.CaptureFixture[str]) -> None:
    before, children = set(threading.enumerate()), Children(is_labelled=True)
    children.start("a", ["sh", "-c", "sleep 100000 & echo $!"], {})
    try:
        assert children.wait() == ("a", 0)
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    finally:
        os.kill(int(capfd.readouterr().out.removeprefix("a | ")), signal.SIGKILL)

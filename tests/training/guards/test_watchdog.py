"""``Watchdog``: limits on a simulated clock, the stop file, and the end of a hanging process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest
from tests.forked import ROOT
from tests.training.clock import Clock

from recipes_lib.errors import EXIT_STALLED
from recipes_lib.stopping import StopRequest
from recipes_lib.training.guards import watchdog as watchdog_module
from recipes_lib.training.guards.watchdog import (
    END_AFTER_SECONDS,
    PATIENCE,
    REPORTING_PHASES,
    SHOW_AFTER_SECONDS,
    Watchdog,
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(clock):
    watchdog = Watchdog(clock)
    watchdog.begin()
    return watchdog


def make_steps(watchdog, clock, seconds, number=10):
    for _ in range(number):
        watchdog.enter("a step")
        clock.now += seconds
        watchdog.poll()
        watchdog.finish_step()
    watchdog.enter("a step")


def watch(watchdog, clock, seconds):
    """Return the actions of the watchdog during ``seconds`` without progress, each with its time."""
    began, actions = clock.now, []
    while clock.now < began + seconds:
        clock.now += 1
        if action := watchdog.poll():
            actions.append((action, clock.now - began))
            if action == "end":
                break
    return actions


def test_stalled_step_is_shown_once_then_ended(watchdog, clock):
    make_steps(watchdog, clock, 1.0)
    assert watch(watchdog, clock, 1e5) == [("show", SHOW_AFTER_SECONDS), ("end", END_AFTER_SECONDS)]


@pytest.mark.parametrize("seconds", [0.01, 60.0, 600.0])
def test_steps_of_usual_length_are_not_shown(watchdog, clock, seconds):
    for _ in range(50):
        make_steps(watchdog, clock, seconds)
        assert watch(watchdog, clock, 6 * seconds) == []


def test_limits_ignore_first_step_and_earlier_training(watchdog, clock):
    for _ in range(2):  # The first step compiles, and a second training in this process has other steps.
        clock.now += 5000.0
        watchdog.finish_step()
        assert watchdog.limits() == (PATIENCE * SHOW_AFTER_SECONDS, PATIENCE * END_AFTER_SECONDS)
        assert "in the work between two steps for 0 seconds" in watchdog.describe()
        make_steps(watchdog, clock, 500.0)
        assert watchdog.limits() == (7 * 500.0, 20 * 500.0)
        watchdog.begin()


def test_limits_scale_with_median_step(watchdog, clock):
    make_steps(watchdog, clock, 500.0)
    assert watch(watchdog, clock, 1e5) == [("show", 7 * 500.0), ("end", 20 * 500.0)]


@pytest.mark.parametrize("phase", ["the first step", "the work between two steps", "saving"])
def test_phase_without_progress_reports_has_longer_limits(watchdog, clock, phase):
    make_steps(watchdog, clock, 1.0)
    watchdog.enter(phase)
    expected = [("show", PATIENCE * SHOW_AFTER_SECONDS), ("end", PATIENCE * END_AFTER_SECONDS)]
    assert watch(watchdog, clock, 1e5) == expected


def test_beat_resets_timeout(watchdog, clock):
    make_steps(watchdog, clock, 1.0)
    watchdog.enter("an evaluation")
    for _ in range(100):
        assert watch(watchdog, clock, SHOW_AFTER_SECONDS - 1) == []
        watchdog.beat()


def test_time_in_which_the_process_was_suspended_is_no_stall(watchdog, clock):
    """As by SLURM's preemption with SUSPEND, or `kill -STOP`: the monotonic clock goes on, and no thread runs."""
    make_steps(watchdog, clock, 1.0)
    assert watch(watchdog, clock, SHOW_AFTER_SECONDS - 1) == []
    clock.now += 10 * END_AFTER_SECONDS
    assert watchdog.poll() is None
    assert watch(watchdog, clock, 1e5) == [("show", SHOW_AFTER_SECONDS), ("end", END_AFTER_SECONDS)]


def test_single_long_step_does_not_change_limits(watchdog, clock):
    make_steps(watchdog, clock, 1.0)
    clock.now += 1500
    watchdog.finish_step()
    make_steps(watchdog, clock, 1.0)
    assert watchdog.limits() == (SHOW_AFTER_SECONDS, END_AFTER_SECONDS)


def test_description_names_rank_phase_and_seconds(watchdog, clock, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    make_steps(watchdog, clock, 1.0)
    clock.now += 700
    assert watchdog.describe() == "rank 3: no progress in a step for 700 seconds"


def test_during_returns_to_previous_phase(watchdog, clock):
    watchdog.enter("an evaluation")
    with watchdog.during("computing metrics"):
        assert watchdog.limits() == (PATIENCE * SHOW_AFTER_SECONDS, PATIENCE * END_AFTER_SECONDS)
        clock.now += END_AFTER_SECONDS
    assert watchdog.phase == "an evaluation"
    assert watch(watchdog, clock, SHOW_AFTER_SECONDS - 1) == []


SILENT_PHASES = {
    *("the first step", "the work between two steps", "the work after an evaluation", "saving"),
    *("computing metrics", "waiting for benchmark scores", "scoring answers (`reward_timeout` limits a call)"),
}
"""Phases that cannot report progress: compilation, disks, and functions of the user."""


def test_every_phase_is_either_reporting_or_silent():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    entered = set(re.findall(r'\.(?:enter|during)\("([^"]+)"', sources)) | {"a step"}
    assert entered - {"starting"} == REPORTING_PHASES | SILENT_PHASES
    assert not REPORTING_PHASES & SILENT_PHASES


def test_stop_file_is_read_and_deleted_by_main_process(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "_TICK_SECONDS", 0.001)
    stop, file = StopRequest(), tmp_path / "STOP"
    file.touch()
    with Watchdog().watching(tmp_path, is_main=False, stop=stop):
        assert stop.reason is None
    with Watchdog().watching(tmp_path, is_main=True, stop=stop):
        # The file is deleted after the request is recorded.
        while file.exists():
            pass
    assert stop.reason == f"the file {file}"


def test_folder_of_that_name_is_no_stop_request(tmp_path, monkeypatch):
    polled = threading.Semaphore(0)

    def poll_once(functions, over):
        try:
            for function in functions:
                function()
        finally:
            polled.release()

    monkeypatch.setattr(watchdog_module, "_repeat", poll_once)
    (tmp_path / "STOP").mkdir()
    with Watchdog().watching(tmp_path, is_main=True, stop=(stop := StopRequest())):
        polled.acquire()
        polled.acquire()  # One for each thread.
    assert stop.reason is None


def test_hanging_process_is_shown_and_ended(tmp_path):
    script = """
import itertools, sys, threading
from pathlib import Path
from recipes_lib.training.guards import watchdog

# A clock that advances by 30 s with each look, from the beginning of the hang on.
looks, hangs = itertools.count(), []
WATCHDOG = watchdog.Watchdog(lambda: 30 * next(looks) if hangs else 0)
watchdog._TICK_SECONDS = 0.001
WATCHDOG.on_stall = lambda reason: Path(sys.argv[1], "recorded").write_text(reason)

def hang_in_a_step():
    hangs.append(True)
    threading.Event().wait()

with WATCHDOG.watching(Path(sys.argv[1]), is_main=True):
    WATCHDOG.enter("a step")
    hang_in_a_step()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=os.environ | {"RANK": "1"},
        check=False,
    )
    assert done.returncode == EXIT_STALLED
    assert done.stderr.count("in hang_in_a_step") == 1
    assert "rank 1: no progress in a step for" in done.stderr
    assert (tmp_path / "recorded").read_text().startswith("rank 1: no progress in a step")


def test_stalled_process_exits_without_terminal(watchdog, clock, monkeypatch):
    class ClosedPipe:
        def write(self, text):
            raise BrokenPipeError

    class EndedError(Exception):
        pass

    def exit_process(code):
        raise EndedError(code)

    make_steps(watchdog, clock, 1.0)
    watch(watchdog, clock, END_AFTER_SECONDS - 1)
    clock.now += 1
    reasons = []
    watchdog.on_stall = reasons.append
    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    monkeypatch.setattr(os, "_exit", exit_process)
    monkeypatch.setattr(watchdog_module.threading, "Timer", lambda *args: threading.Thread(target=lambda: None))
    monkeypatch.setattr(watchdog_module, "record_failure", lambda error, code: None)
    with pytest.raises(EndedError, match=str(EXIT_STALLED)):
        watchdog._act()
    assert reasons == ["rank 0: no progress in a step for 1800 seconds"]

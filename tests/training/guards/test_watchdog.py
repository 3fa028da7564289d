"""When a run is taken for stalled, on a clock of the test's own; and a real one that is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from tests.training.clock import Clock

from recipes_lib.errors import EXIT_STALLED
from recipes_lib.stopping import StopRequest
from recipes_lib.training.guards import watchdog
from recipes_lib.training.guards.watchdog import END_AFTER_SECONDS, PATIENCE, SHOW_AFTER_SECONDS, Watchdog


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(clock):
    dog = Watchdog(clock)
    dog.begin()
    return dog


def make_steps(dog, clock, seconds, number=10):
    for _ in range(number):
        dog.enter("a step")
        clock.now += seconds
        dog.finish_step()
    dog.enter("a step")


def watch(dog, clock, seconds):
    """What is said during a silence, and when."""
    began, said = clock.now, []
    while clock.now < began + seconds:
        clock.now += 1
        if verdict := dog.poll():
            said.append((verdict, clock.now - began))
            if verdict == "end":
                break
    return said


def test_a_silent_step_is_shown_once_and_then_ended(dog, clock):
    make_steps(dog, clock, 1.0)
    assert watch(dog, clock, 1e5) == [("show", SHOW_AFTER_SECONDS), ("end", END_AFTER_SECONDS)]


@pytest.mark.parametrize("seconds", [0.01, 60.0, 600.0])
def test_no_step_of_usual_length_is_ever_shown(dog, clock, seconds):
    for _ in range(50):
        make_steps(dog, clock, seconds)
        assert watch(dog, clock, 6 * seconds) == []


def test_long_steps_are_given_their_time(dog, clock):
    make_steps(dog, clock, 500.0)
    assert watch(dog, clock, 1e5) == [("show", pytest.approx(20 * 500 / 3, abs=1)), ("end", 20 * 500.0)]


@pytest.mark.parametrize("phase", ["the first step", "the work between two steps", "saving"])
def test_what_cannot_tell_of_its_progress_is_given_more(dog, clock, phase):
    make_steps(dog, clock, 1.0)
    dog.enter(phase)
    assert watch(dog, clock, 1e5) == [("show", PATIENCE * SHOW_AFTER_SECONDS), ("end", PATIENCE * END_AFTER_SECONDS)]


def test_any_progress_begins_the_silence_anew(dog, clock):
    make_steps(dog, clock, 1.0)
    dog.enter("an evaluation")
    for _ in range(1000):
        clock.now += SHOW_AFTER_SECONDS - 1
        assert dog.poll() is None
        dog.beat()


def test_one_long_step_does_not_move_the_limit(dog, clock):
    make_steps(dog, clock, 1.0)
    clock.now += 1500
    dog.finish_step()
    make_steps(dog, clock, 1.0)
    assert dog.limits() == (SHOW_AFTER_SECONDS, END_AFTER_SECONDS)


def test_who_is_silent_in_what_and_for_how_long_is_told(dog, clock, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    make_steps(dog, clock, 1.0)
    clock.now += 700
    assert dog.describe() == "rank 3: no progress in a step for 700 seconds"


def test_the_file_is_taken_for_a_request_and_away_by_the_main_process(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.001)
    stop, file = StopRequest(), tmp_path / "STOP"
    file.touch()
    with Watchdog().watching(tmp_path, is_main=False, stop=stop):
        assert stop.reason is None
    with Watchdog().watching(tmp_path, is_main=True, stop=stop):
        # It goes last: who sees that it is gone knows that the request was heard.
        while file.exists():
            pass
    assert stop.reason == f"the file {file}"


def test_a_real_step_that_hangs_is_shown_and_ended(tmp_path):
    script = """
import sys, threading
from pathlib import Path
from recipes_lib.training.guards import watchdog
from recipes_lib.training.guards.watchdog import WATCHDOG

watchdog._TICK_SECONDS, watchdog.SHOW_AFTER_SECONDS, watchdog.END_AFTER_SECONDS = 0.01, 0.1, 0.5
WATCHDOG.on_stall = lambda reason: Path(sys.argv[1], "recorded").write_text(reason)

def hang_in_a_step():
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


def test_a_stalled_process_ends_though_its_terminal_is_gone(dog, clock, monkeypatch):
    class ClosedPipe:
        def write(self, text):
            raise BrokenPipeError

    class EndedError(Exception):
        pass

    def leave(code):
        raise EndedError(code)

    make_steps(dog, clock, 1.0)
    clock.now += END_AFTER_SECONDS
    reasons = []
    dog.on_stall = reasons.append
    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog.threading, "Timer", lambda *given: threading.Thread(target=lambda: None))
    monkeypatch.setattr(watchdog, "record_failure", lambda error, *, is_unforeseen: None)
    with pytest.raises(EndedError, match=str(EXIT_STALLED)):
        dog._act()
    assert reasons == ["rank 0: no progress in a step for 1800 seconds"]

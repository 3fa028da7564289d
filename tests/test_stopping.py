"""What a signal does: in real processes, since handlers belong to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes_lib.errors import PreemptedError
from recipes_lib.stopping import STOP_SIGNALS, StopRequest

IMPORTS = "import os, signal, sys, time\nfrom recipes_lib.stopping import STOP\n"
# The tests may themselves be run under nohup.
PRELUDE = IMPORTS + "signal.signal(signal.SIGHUP, signal.SIG_DFL)\nSTOP.install()\n"


def start(body, prelude=PRELUDE):
    command = [sys.executable, "-u", "-c", prelude + body]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def wait_for_line(process, line):
    while (told := process.stdout.readline().strip()) != line:
        assert told, process.communicate()


def has_pending(pid, number):
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_with_nothing_to_save_a_signal_unwinds_and_leaves(number):
    process = start(
        "try:\n  print('ready'); time.sleep(60)\nexcept Exception: print('swallowed')\nfinally: print('clean')"
    )
    wait_for_line(process, "ready")
    process.send_signal(number)
    told, _ = process.communicate(timeout=30)
    assert (process.returncode, told) == (75, "clean\n")


def test_a_deferred_signal_waits_for_the_end_of_the_block():
    process = start(
        "with STOP.deferred():\n  print('ready')\n  while not STOP.reason: time.sleep(0.01)\n  print(STOP.reason)\n"
        "print('never')"
    )
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30)[0] == "SIGUSR1\n"
    assert process.returncode == 75


def test_signals_in_quick_succession_are_one_request_and_a_later_one_leaves_at_once():
    process = start("with STOP.deferred():\n  print('ready')\n  time.sleep(60)")
    wait_for_line(process, "ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    assert time.monotonic() - began >= 1.0
    # The second SIGTERM, where this process was not scheduled for a second between the two.
    again = signal.Signals(process.returncode - 128)
    assert again in (signal.SIGINT, signal.SIGTERM)
    assert f"{again.name} again: exits immediately" in process.communicate()[1]


def test_a_second_signal_is_heard_where_the_main_thread_never_comes_back_from_c():
    # A lock that nobody lets go stands for a collective operation that hangs.
    process = start(
        "import ctypes\n"
        "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock\n"
        "with STOP.deferred():\n  print('ready'); lock(mutex); lock(mutex)"
    )
    wait_for_line(process, "ready")
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.returncode == 128 + signal.SIGTERM


HANG = (
    "import ctypes\n"
    "from recipes_lib import stopping\n"
    "stopping._SECONDS_TO_LEAVE = 0.2\n"
    "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock\n"
    "def hang():\n  print('ready'); lock(mutex); lock(mutex)\n"
)


@pytest.mark.parametrize("ending", ["hang()", "STOP.close(); hang()"])
def test_who_hangs_on_the_way_out_is_gone_in_time(ending):
    process = start(f"{HANG}try:\n  signal.raise_signal(signal.SIGTERM)\nfinally:\n  {ending}")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "SIGTERM: exits immediately, with nothing to save" in errors


def test_with_nothing_to_save_one_signal_is_enough_where_the_main_thread_never_comes_back_from_c():
    process = start(f"{HANG}hang()")
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_once_closed_nothing_is_heard():
    process = start("STOP.close(); print('ready'); sys.stdin.readline(); print('done')")
    wait_for_line(process, "ready")
    for number in STOP_SIGNALS:
        process.send_signal(number)
    assert process.communicate("go\n", timeout=30)[0] == "done\n"
    assert process.returncode == 0


@pytest.mark.parametrize("ending", ["", "STOP.close()\n"])
def test_under_nohup_a_closed_terminal_is_no_request(ending):
    body = f"{ending}print('ready'); sys.stdin.readline(); print(STOP.reason)"
    process = start(body, IMPORTS + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nSTOP.install()\n")
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGHUP)
    assert process.communicate("go\n", timeout=30)[0] == "None\n"
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="workers are not forked there")
def test_a_forked_child_leaves_signals_to_its_parent_and_obeys_it():
    body = (
        "child = os.fork()\n"
        "if child == 0:\n  print('ready')\n  time.sleep(60); os._exit(1)\n"
        "sys.stdin.readline()\n"
        "assert os.waitpid(child, os.WNOHANG) == (0, 0), 'the child died'\n"
        "assert STOP.reason is None, 'the child told its parent'\n"
        "os.kill(child, signal.SIGTERM); print('status', os.waitpid(child, 0)[1])"
    )
    process = start(body)
    wait_for_line(process, "ready")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in STOP_SIGNALS:
        os.kill(int(child), number)
    # One that is still waiting would be one with that of the parent.
    while has_pending(int(child), signal.SIGTERM):
        time.sleep(0.01)
    told, errors = process.communicate("go\n", timeout=30)
    assert told == "status 0\n", errors


def test_a_process_beside_that_failed_is_no_request(tmp_path):
    for number, pid in (("0", ""), ("1", "999999999")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "pid").write_text(pid)
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json")}
    command = [sys.executable, "-u", "-c", PRELUDE + "print('ready')\nwith STOP.deferred(): time.sleep(60)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 1


def test_a_launcher_that_is_gone_is_noticed(monkeypatch):
    stop = StopRequest()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not stop.launcher_is_gone()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert stop.launcher_is_gone()


def test_who_asked_first_is_remembered_and_raised_at_the_end_of_the_block():
    stop = StopRequest()

    def be_asked_twice() -> None:
        with stop.deferred():
            stop.request("the file STOP")
            stop.request("SIGTERM")

    with pytest.raises(PreemptedError, match="the file STOP"):
        be_asked_twice()
    assert not stop.is_deferred

"""Stop requests by signals, in real processes, because signal handlers are per process."""

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
# pytest itself may run under nohup, which ignores SIGHUP.
PRELUDE = IMPORTS + "signal.signal(signal.SIGHUP, signal.SIG_DFL)\nSTOP.install()\n"


def start(body, prelude=PRELUDE):
    command = [sys.executable, "-u", "-c", prelude + body]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def wait_for_line(process, line):
    while (read := process.stdout.readline().strip()) != line:
        assert read, process.communicate()


def has_pending(pid, number):
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_signal_outside_deferred_block_unwinds_and_exits(number):
    process = start(
        "try:\n  print('ready'); time.sleep(60)\nexcept Exception: print('swallowed')\nfinally: print('clean')"
    )
    wait_for_line(process, "ready")
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (75, "clean\n")
    # `run_command` would print it; during the imports of a recipe there is none.
    assert errors == f"{number.name}: stopped with nothing to save; run the same command to resume\n"


def test_deferred_signal_exits_at_end_of_block():
    process = start(
        "with STOP.deferred():\n  print('ready')\n  while not STOP.reason: time.sleep(0.01)\n  print(STOP.reason)\n"
        "print('never')"
    )
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30)[0] == "SIGUSR1\n"
    assert process.returncode == 75


def test_later_second_signal_exits_immediately():
    process = start("with STOP.deferred():\n  print('ready')\n  time.sleep(60)")
    wait_for_line(process, "ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    assert time.monotonic() - began >= 1.0
    # SIGTERM if this process was not scheduled for a second between the first two signals.
    again = signal.Signals(process.returncode - 128)
    assert again in (signal.SIGINT, signal.SIGTERM)
    assert f"{again.name} again: exits immediately" in process.communicate()[1]


def test_second_signal_exits_while_main_thread_blocks_in_c():
    # A mutex that is never unlocked simulates a collective operation that hangs.
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
def test_process_that_hangs_at_exit_is_ended(ending):
    process = start(f"{HANG}try:\n  signal.raise_signal(signal.SIGTERM)\nfinally:\n  {ending}")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "SIGTERM: exits immediately, with nothing to save" in errors


def test_second_signal_at_exit_from_imports_does_not_kill():
    """A scheduler signals every process, and a launcher forwards it: the exit code is still 75."""
    # Deleted when Python has restored the default actions.
    late = "class Late:\n  def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 15)\nlate = Late()\n"
    process = start(f"{late}signal.raise_signal(signal.SIGTERM)")
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_one_signal_exits_while_main_thread_blocks_with_nothing_to_save():
    process = start(f"{HANG}hang()")
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_signal_of_a_second_run_in_the_process_is_its_first():
    process = start(
        "import threading\nfrom recipes_lib import stopping\n"
        "stopping.SECONDS_OF_ONE_REQUEST, seen = 0, threading.Semaphore(0)\n"
        "stopping._start_timer = lambda *_: seen.release()\n"
        "for _ in range(2):\n  STOP.reset()\n  try:\n    with STOP.deferred():\n"
        "      signal.raise_signal(signal.SIGTERM)\n      seen.acquire()\n  except SystemExit:\n    print('stopped')\n"
    )
    printed, errors = process.communicate(timeout=30)
    assert (printed.split(), process.returncode) == (["stopped", "stopped"], 0), errors


def test_closed_request_ignores_signals():
    process = start("STOP.close(); print('ready'); sys.stdin.readline(); print('done')")
    wait_for_line(process, "ready")
    for number in STOP_SIGNALS:
        process.send_signal(number)
    assert process.communicate("go\n", timeout=30)[0] == "done\n"
    assert process.returncode == 0


def test_session_keeps_its_own_handlers():
    """As after ``%run recipes/sft.py``: an interrupt of a later cell must not end the notebook."""
    handlers = "[signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]"
    body = f"sys.ps1 = '>>> '\nbefore = {handlers}\nSTOP.install()\nprint({handlers} == before)"
    assert start(body, IMPORTS).communicate(timeout=30)[0] == "True\n"


def test_interrupt_without_handlers_is_deferred_once():
    body = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # A shell ignores it in the background.
        "def work():\n  with STOP.deferred():\n    os.kill(os.getpid(), signal.SIGINT)\n    print(STOP.reason)\n"
        "    if again: os.kill(os.getpid(), signal.SIGINT)\n"
        "for again in (False, True):\n  STOP.reset()\n"
        "  try: work()\n  except BaseException as error: print(type(error).__name__)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    output = start(body, IMPORTS).communicate(timeout=30)[0]
    assert output.split() == ["SIGINT", "PreemptedError", "SIGINT", "KeyboardInterrupt", "True"]


@pytest.mark.parametrize("ending", ["", "STOP.close()\n"])
def test_ignored_sighup_stays_ignored(ending):
    body = f"{ending}print('ready'); sys.stdin.readline(); print(STOP.reason)"
    process = start(body, IMPORTS + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nSTOP.install()\n")
    wait_for_line(process, "ready")
    process.send_signal(signal.SIGHUP)
    assert process.communicate("go\n", timeout=30)[0] == "None\n"
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="workers are not forked there")
def test_forked_child_obeys_only_its_parent():
    body = (
        "child = os.fork()\n"
        "if child == 0:\n  print('ready')\n  time.sleep(60); os._exit(1)\n"
        "sys.stdin.readline()\n"
        "assert os.waitpid(child, os.WNOHANG) == (0, 0), 'the child died'\n"
        "assert STOP.reason is None, 'the signal reached the parent'\n"
        "os.kill(child, signal.SIGTERM); print('status', os.waitpid(child, 0)[1])"
    )
    process = start(body)
    wait_for_line(process, "ready")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in STOP_SIGNALS:
        os.kill(int(child), number)
    # A pending signal would merge with that of the parent.
    while has_pending(int(child), signal.SIGTERM):
        time.sleep(0.01)
    output, errors = process.communicate("go\n", timeout=30)
    assert output == "status 0\n", errors


@pytest.mark.skipif(sys.platform == "darwin", reason="workers are not forked there")
def test_worker_ends_if_its_queue_cannot_send_an_item():
    body = (
        "import multiprocessing\n"
        "queue = multiprocessing.get_context('fork').Queue()\n"
        "child = os.fork()\n"
        "if child == 0:\n  queue.put(lambda: 0)\n  time.sleep(60); os._exit(0)\n"
        "print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    output, errors = start(body).communicate(timeout=30)
    assert output == "status 1\n", errors
    assert "a worker process ends: " in errors


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("signal.raise_signal(signal.SIGTERM)", ""),
        # The main thread is in C, as in a collective operation.
        ("os.system('kill -TERM $PPID; exec sleep 9 >&- 2>&-')", "exits because process 1 of this machine ended"),
    ],
)
def test_signal_after_failure_of_peer_is_not_preemption(tmp_path, stop, words):
    for number, pid in (("0", ""), ("1", "999999999")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "pid").write_text(pid)
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json")}
    body = f"from recipes_lib import stopping\nstopping.SECONDS_TO_UNWIND = 0.2\nwith STOP.deferred(): {stop}"
    command = [sys.executable, "-c", PRELUDE + body]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert words in done.stderr


def test_rank_that_is_stopped_alone_says_and_records_why(tmp_path):
    """In the imports of a recipe, where other ranks and the launcher have no other sign of the reason."""
    for number in "01":
        (tmp_path / number).mkdir()
        (tmp_path / number / "pid").write_text("")
    body = "signal.raise_signal(signal.SIGTERM)"
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "1" / "error.json"), "RANK": "1"}
    command = [sys.executable, "-c", PRELUDE + body]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 75
    assert done.stderr == "SIGTERM: stopped with nothing to save; run the same command to resume\n"
    assert '"errorCode": 75' in (tmp_path / "1" / "error.json").read_text()
    assert not (tmp_path / "1" / "pid").exists()


def test_launcher_is_gone_when_parent_changes(monkeypatch):
    stop = StopRequest()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not stop.launcher_is_gone()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert stop.launcher_is_gone()


def test_first_reason_is_raised_at_end_of_block():
    stop = StopRequest()

    def be_asked_twice() -> None:
        with stop.deferred():
            stop.request("the file STOP")
            stop.request("SIGTERM")

    with pytest.raises(PreemptedError, match="the file STOP"):
        be_asked_twice()
    assert not stop.is_deferred

"""Sandbox: denied operations, limits, and that a program passes only if it reaches its last line."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from recipes_lib import sandbox
from recipes_lib.errors import ConfigError
from recipes_lib.sandbox import MAX_STDERR, run_program


def has_landlock() -> bool:
    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) > 0


IMPORTS = "import collections, datetime, functools, hashlib, heapq, itertools, math, random, re, string, typing\n"


@pytest.mark.parametrize(
    "source",
    [
        IMPORTS + "assert collections.namedtuple('P', 'x y')(1, 2).y == math.isqrt(4)",
        "with open('notes.txt', 'w') as file:\n    file.write('x')\nassert open('notes.txt').read() == 'x'",
        "print('x' * 100_000)",
        "if __name__ == '__main__':\n    assert True\nelse:\n    raise ValueError",
        "import numpy\nassert (numpy.ones((9, 9)) @ numpy.ones(9)).sum() == 81",
        "\ufeffassert True",
        "import pickle\nclass A: pass\nassert isinstance(pickle.loads(pickle.dumps(A())), A)",
        "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\n"
        "assert unittest.main(exit=False).result.testsRun == 1",
        "import os, shutil, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    open(folder + '/x', 'w')",
    ],
)
def test_program_that_reaches_last_line_passes(source: str) -> None:
    assert run_program(source).outcome == "passed"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", ""),
        ("import os; os._exit(0)", ""),
        ("import os; os.write(1, b'passed'); os._exit(0)", ""),
        ("x = 'a' * (1 << 34)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "os.fork is not allowed"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen is not allowed"),
        ("import os; os.system('true')", "os.system is not allowed"),
        ("import ctypes; ctypes.CDLL(None)", "ctypes.dlopen is not allowed"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "socket."),
        ("import socket; socket.socket(socket.AF_UNIX).bind('x')", "socket.bind is not allowed"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')", "socket."),
        ("open('file', 'wb').write(b'0' * (1 << 25))", "File too large"),
        ("import os; os.kill(os.getppid(), 9)", "os.kill is not allowed"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))", "resource.setrlimit is not allowed"),
        ("assert '\ud800' == '\ud800'; raise KeyError('end')", "KeyError"),
        # Unbounded output of a program must not fill the memory of this process.
        ("import sys\nwhile True: sys.stderr.write('x' * (1 << 20))", "xxxx"),
        ("import os\nfor at in range(3, 9):\n  try: os.write(at, b'x' * (1 << 25))\n  except OSError: pass", ""),
    ],
)
def test_failing_early_exiting_and_forbidden_programs_fail(source: str, message: str) -> None:
    verdict = run_program(source, seconds=20)
    assert verdict.outcome == "failed"
    assert message in verdict.stderr
    assert len(verdict.stderr) <= MAX_STDERR


@pytest.mark.parametrize(
    "change",
    [
        "open({0!r}, 'w')",
        "open({0!r}, 'r+')",
        "import os; os.open({0!r}, os.O_RDWR)",
        "import os; os.remove({0!r})",
        "import os; os.rename({0!r}, 'mine')",
        "import os; os.truncate({0!r}, 0)",
        "import shutil; shutil.move({0!r}, '.')",
        "import os; os.open({0!r}, os.O_TRUNC)",
        "import os; os.remove('kept.txt', dir_fd=os.open({1!r}, os.O_RDONLY))",
        "import os; os.open('new.txt', os.O_CREAT, dir_fd=os.open({1!r}, os.O_RDONLY))",
        "import os; os.open({1!r} + '/new.txt', os.O_CREAT)",
        "import os; os.symlink({1!r}, 'link'); open('link/kept.txt', 'w')",
    ],
)
def test_files_outside_folder_are_unchanged(tmp_path: Path, change: str) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    verdict = run_program(change.format(str(kept), str(tmp_path)))
    assert verdict.outcome == "failed"
    assert "only the working directory" in verdict.stderr
    assert kept.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
@pytest.mark.parametrize(
    "change",
    [
        "import os; os.mkfifo({0!r} + '/fifo')",
        "import os; os.mknod({0!r} + '/node')",
        # A program can replace the functions that an audit hook in Python calls.
        "import os; os.path.realpath = lambda _: os.getcwd(); os.lstat = None; os.mkdir({0!r} + '/folder')",
        "import multiprocessing.util as u, os\npid = u.spawnv_passfds(b'/bin/true', [b'true'], ())\n"
        "assert not os.waitpid(pid, 0)[1]",
    ],
)
def test_landlock_denies_calls_without_audit_event(tmp_path: Path, change: str) -> None:
    assert run_program(change.format(str(tmp_path))).outcome == "failed"
    assert not list(tmp_path.iterdir())


FORGE = """
def forge(found):
    for value in found:
        if isinstance(value, tuple):
            forge(value)
        if callable(value) and hasattr(value, 'args'):
            forge(value.args)
        if isinstance(value, bytes) and len(value) == 16:
            for descriptor in range(3, 20):
                try: os.write(descriptor, value)
                except OSError: pass
            os._exit(0)
"""


@pytest.mark.parametrize(
    "search",
    [
        "import __main__; forge(vars(__main__).values())",
        "frame = sys._getframe()\nwhile frame:\n    forge([*frame.f_globals.values(), *frame.f_locals.values()])\n"
        "    frame = frame.f_back",
        "import gc; forge(gc.get_objects())",
        "forge([os.read(0, 99).strip()])",
        "seen = open('/proc/self/mem', 'rb', 0)",
        "sys.settrace(lambda *_: None)",
    ],
)
def test_program_cannot_forge_pass(search: str) -> None:
    assert run_program(f"import os, sys{FORGE}{search}\nraise AssertionError('a failed test')").outcome == "failed"


def test_endless_programs_time_out() -> None:
    assert run_program("while True: pass", seconds=0.5).outcome == "timed out"
    assert (
        run_program("import time\ntry:\n    time.sleep(99)\nfinally:\n    time.sleep(99)", seconds=0.5).outcome
        == "timed out"
    )


SLEEPING_PROGRAM = """
import subprocess
from recipes_lib import sandbox
class Reported(subprocess.Popen):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        print(self.pid, flush=True)
subprocess.Popen = Reported
sandbox._run("import time; time.sleep(600)", 600.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and file descriptors of processes are Linux's")
def test_program_ends_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPING_PROGRAM], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        program = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    # Readable when the program has ended.
    ended, _, _ = select.select([program], [], [], 60.0)
    os.close(program)
    assert ended


@pytest.mark.parametrize("content", ["b'0' * (1 << 22)", "b''"], ids=["large files", "many files"])
def test_program_that_fills_folder_is_killed(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_FOLDER_BYTES", 1 << 23)
    source = f"import itertools\nfor at in itertools.count():\n    open(str(at), 'wb').write({content})"
    verdict = run_program(source, seconds=30)
    assert (verdict.outcome, "its files take more than 8,388,608 bytes" in verdict.stderr) == ("failed", True)


def test_deep_folders_are_deleted() -> None:
    # Not in ``tmp_path``: if this test were killed, pytest could not delete the folder, and no later run would start.
    with sandbox._temporary_folder() as folder:
        place = Path(folder)
        for _ in range(1200):
            place /= "d"
            place.mkdir()
    assert not Path(folder).exists()


def test_environment_variables_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run_program("import os; assert 'SECRET_TOKEN' not in os.environ").outcome == "passed"


def test_sandbox_that_runs_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_ADDRESS_SPACE", 1 << 16)
    sandbox._verify_sandbox.cache_clear()
    with pytest.raises(ConfigError, match="an empty program failed"):
        run_program("pass")

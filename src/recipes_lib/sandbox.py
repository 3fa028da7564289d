"""Sandbox for generated Python code: a subprocess with limits on time, memory, processes and files, no network.

It protects against accidents, not against an attacker: run evaluations of code in a container.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from recipes_lib.errors import ConfigError, Problem

Outcome = Literal["passed", "failed", "timed out"]
MAX_STDERR: Final = 2000
"""Maximum characters of standard error in a verdict, from its end."""
_ADDRESS_SPACE: Final = 1 << 30
_MAX_FOLDER_BYTES: Final = 1 << 26
"""Size of a program's folder above which it is killed, 64 MiB."""
_MIN_ENTRY_BYTES: Final = 1 << 12
"""Added to the size of each file, folder and link, so that empty ones, which take inodes, count too."""
_SECONDS_BETWEEN_CHECKS: Final = 0.1

# Runs in the sandboxed process before the program. ``argv``: CPU seconds, bytes of address space, and the id of the
# parent. Standard input: a random word that is echoed after the last line, so that a program that exits early
# (`sys.exit(0)`) does not pass. An audit hook cannot be removed once it is added.
#
# On Linux the kernel sends SIGKILL (9) when the parent ends (PR_SET_PDEATHSIG, 1): nothing else limits the wall time of
# a program whose parent was killed. The parent may have ended before that call.
#
# Landlock (Linux 5.13) makes the kernel deny other programs and writes elsewhere and, in newer kernels, TCP (6.7) and
# signals (6.12); audit hooks alone miss calls without an event, such as `os.mkfifo`. Its system calls have the same
# numbers on every architecture: 444 creates a ruleset, 445 adds a rule, 446 enforces it, which in an unprivileged
# process requires PR_SET_NO_NEW_PRIVS (38).
#
# The program must not find the word: it is in no Python variable, only in the C-level arguments of `map`, where no
# frame shows it.
_LAUNCHER: Final = r"""
import ctypes, functools, os, resource, struct, sys
def restrict():
    system = ctypes.CDLL(None, use_errno=True).syscall
    version = system(444, None, 0, 1)
    if version < 1:
        return
    changes = (1 << 13 + min(version, 3) - 1) - 1 & ~0b1100
    handled = struct.pack("QQQ", changes, 3 * (version >= 4), 3 * (version >= 6))
    rules = system(444, handled, 8 if version < 4 else 16 if version < 6 else 24, 0)
    for place, allowed in ((".", changes & ~1), (os.devnull, changes & 1 << 14 | 2)):
        system(445, rules, 1, struct.pack("=Qi", allowed, os.open(place, os.O_PATH)), 0)
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    if system(446, rules, 0):
        raise OSError("Landlock refuses its own rules")
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[3]):
        sys.exit("the process that waits for this program has ended")
    restrict()
    # macOS does not limit address space: the call fails there.
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
for kind, limit in (
    (resource.RLIMIT_CPU, int(sys.argv[1])), (resource.RLIMIT_FSIZE, 1 << 24), (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(kind, (limit, limit))
with open("program.py", encoding="utf-8-sig") as file:
    code = compile(file.read(), "program.py", "exec")
def build_hook():
    home, isdir, realpath = os.path.realpath(os.getcwd()) + os.sep, os.path.isdir, os.path.realpath
    refused = (
        "_thread.start_new_thread", "ctypes.", "gc.", "os.chdir", "os.exec", "os.fork", "os.kill", "os.posix_spawn",
        "os.spawn", "os.system", "pty.", "resource.", "signal.pthread_kill", "socket.", "subprocess.",
        "sys.monitoring", "sys.setprofile", "sys.settrace",
    )
    changing = (
        "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
        "os.truncate", "os.utime", "shutil.",
    )
    writing = 3 | os.O_CREAT | os.O_TRUNC
    def refuse(event, arguments):
        if event == "socket.__new__" and arguments[1] == 1:
            return  # AF_UNIX, for the socket pair of an event loop; `socket.connect` and `socket.bind` are refused.
        if event.startswith(refused):
            raise PermissionError(event + " is not allowed here")
        named = [os.fsdecode(one) for one in arguments if isinstance(one, (str, bytes))]
        if event == "open":
            # Opening a folder counts as a write: the event of a later `openat` relative to it lacks its path.
            named = named[:1] if isinstance(arguments[0], (str, bytes)) else []
            if [place for place in named if realpath(place).startswith("/proc/")]:
                raise PermissionError("open of " + repr(named[0]) + ": /proc is not readable here")
            if not (set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & writing or isdir(arguments[0])):
                return
        elif not event.startswith(changing):
            return
        for place in named:
            if not (realpath(place) + os.sep).startswith(home):
                raise PermissionError(event + " of " + repr(place) + ": only the working directory may be changed")
    return refuse
sys.argv[:], said, sys.stdout = ["program.py"], os.dup(1), open(os.devnull, "w")
os.dup2(sys.stdout.fileno(), 1)
sys.addaudithook(build_hook())
# `unittest.main` and pickle look names up in `sys.modules["__main__"]`.
launcher, sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
vars(sys.modules["__main__"])["__builtins__"] = __builtins__
list(map(lambda step: step(), (
    functools.partial(exec, code, vars(sys.modules["__main__"])),
    functools.partial(os.write, said, os.read(0, 64)),
)))
"""


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield an empty folder, and delete it whatever the program left in it."""
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        yield folder
    finally:
        # Before Python 3.13, `shutil.rmtree` is recursive and limited to 1,000 levels.
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _measure(folder: str) -> int:
    """Return the size of a folder in bytes; entries that are deleted meanwhile do not count."""
    size = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                size += _MIN_ENTRY_BYTES + Path(place, name).lstat().st_size
    return size


class Verdict(NamedTuple):
    """Outcome of a program, and the end of its standard error."""

    outcome: Outcome
    stderr: str


def run_program(source: str, *, seconds: float = 10.0) -> Verdict:
    """Run a Python program and return how it ended: ``passed`` if its last line was reached without an exception.

    It runs isolated (``python -I``) in an empty folder, without this process's environment variables. Limits: wall
    time, 1 GiB of address space (not on macOS), 16 MiB per file and of output, 64 MiB of files; no child processes,
    ctypes, network access, or writes outside the folder. Packages of this environment can be imported.

    Args:
        source: Source code of the program, tests included.
        seconds: Limit on wall time.

    Raises:
        ConfigError: This machine runs no program in the sandbox.

    Source: ``tests/test_sandbox.py`` has endless loops, fork bombs, writes and connections.
    """
    _verify_sandbox()
    return _run(source, seconds)


@functools.cache
def _verify_sandbox() -> None:
    # Such as with a lower `ulimit -v`, or a kernel that denies a call: every program would count as wrong.
    verdict = _run("", seconds=60.0)
    if verdict.outcome != "passed":
        found = f"an empty program {verdict.outcome}: {(verdict.stderr.strip().splitlines() or [''])[-1]}"
        raise ConfigError(Problem("sandbox for programs", found, "raise the limits of `ulimit -a`, or use a container"))


def _run(source: str, seconds: float) -> Verdict:
    word = secrets.token_hex(8).encode()
    # Output goes to files, not pipes: RLIMIT_FSIZE bounds a file, while a pipe would have to be drained into memory.
    with (
        _temporary_folder() as folder,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        # `errors="replace"`: a lone surrogate cannot be encoded, and is not valid Python anyway.
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, str(int(seconds) + 1), str(_ADDRESS_SPACE), str(os.getpid())],
            cwd=folder,
            env={"HOME": folder, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            # Its own process group, so that killing the group ends all that the program started.
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(word)
            for _ in range(math.ceil(seconds / _SECONDS_BETWEEN_CHECKS)):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_BETWEEN_CHECKS)
                    break
                # No limit of the kernel bounds the number of files without privileges.
                if _measure(folder) > _MAX_FOLDER_BYTES:
                    return Verdict("failed", f"its files take more than {_MAX_FOLDER_BYTES:,} bytes")
            else:
                return Verdict("timed out", f"not done after {seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        outcome: Outcome = "passed" if stdout.read(len(word) + 1) == word and not process.returncode else "failed"
        # A UTF-8 character has at most four bytes.
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 4 * MAX_STDERR))
        return Verdict(outcome, stderr.read().decode(errors="replace")[-MAX_STDERR:])

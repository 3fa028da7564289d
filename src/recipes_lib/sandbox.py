"""Sandbox for generated Python code: a subprocess with limits on time, memory, processes and files, no network.

It protects against accidents, not against an attacker: run evaluations of code in a container.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

Outcome = Literal["passed", "failed", "timed out"]
MAX_TOLD: Final = 2000
"""Characters of standard error that are kept."""
_ADDRESS_SPACE: Final = 1 << 30

# Runs in the sandboxed process before the code: ``argv`` holds seconds and bytes, standard input a word to say at the
# end, by which a program that leaves early is found. The hook stays for good: Python has no way to take one off.
#
# Landlock (Linux 5.13) has the kernel refuse other programs, changes elsewhere and, where it is newer, TCP (6.7) and
# signals (6.12): no audit event tells of `os.mkfifo`. Its system calls have the same numbers on every architecture:
# 444 creates the rules, 445 adds one, 446 applies them. The last needs PR_SET_NO_NEW_PRIVS (38) of a process without
# privileges.
#
# The word is in no variable that a frame shows: C holds it, in the arguments of `map`, until the program has ended.
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
restrict()
for kind, limit in (
    (resource.RLIMIT_CPU, int(sys.argv[1])), (resource.RLIMIT_AS, int(sys.argv[2])), (resource.RLIMIT_FSIZE, 1 << 24),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(kind, (limit, limit))
with open("program.py", encoding="utf-8") as file:
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
        if event.startswith(refused):
            raise PermissionError(event + " is not allowed here")
        named = [os.fsdecode(one) for one in arguments if isinstance(one, (str, bytes))]
        if event == "open":
            # Of a folder too: what is named relative to it is told without it.
            named = named[:1] if isinstance(arguments[0], (str, bytes)) else []
            if [place for place in named if realpath(place).startswith("/proc/")]:
                raise PermissionError("open of " + repr(named[0]) + ": no process is looked at here")
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
list(map(lambda step: step(), (
    functools.partial(exec, code, {"__name__": "__main__", "__builtins__": __builtins__}),
    functools.partial(os.write, said, os.read(0, 64)),
)))
"""


class Verdict(NamedTuple):
    """How a program ended, and the last part of its standard error."""

    outcome: Outcome
    told: str


def run_program(source: str, *, seconds: float = 10.0) -> Verdict:
    """Run a Python program and return how it ended: ``passed`` if its last line was reached without an exception.

    It runs isolated (``python -I``) in an empty folder, with nothing of this process's environment, at most so many
    seconds, with 1 GiB of address space, files of at most 16 MiB, and as much output; without child processes, ctypes,
    network, or changes elsewhere. Packages of this environment can be imported.

    Args:
        source: The program, tests included.
        seconds: Of wall time.

    Source: ``tests/test_sandbox.py`` has endless loops, fork bombs, writes and connections.
    """
    word = secrets.token_hex(8).encode()
    # Files and not pipes for its output: the limit on the size of a file holds for them, while this process would have
    # to read, and keep, gigabytes a second from a pipe.
    with (
        tempfile.TemporaryDirectory(prefix="program-") as folder,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as told,
    ):
        # Half of a surrogate pair is not UTF-8, and no program either.
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, str(int(seconds) + 1), str(_ADDRESS_SPACE)],
            cwd=folder,
            env={"HOME": folder, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=told,
            # A group of its own, so that whatever the program has started ends with it.
            start_new_session=True,
        )
        try:
            process.communicate(word, timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", f"not done after {seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        outcome: Outcome = "passed" if said.read(len(word) + 1) == word and not process.returncode else "failed"
        # A character of UTF-8 has at most four bytes.
        told.seek(max(0, told.seek(0, os.SEEK_END) - 4 * MAX_TOLD))
        return Verdict(outcome, told.read().decode(errors="replace")[-MAX_TOLD:])

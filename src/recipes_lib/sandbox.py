"""Runs Python code of a model in a process of its own with limits: time, memory, processes, files, no network.

A limit against accidents and clumsy code, not against an attacker: run evaluations of code in a container.
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
"""Characters of the error that are kept."""

# Runs in the sandboxed process before the code: ``argv`` holds seconds and bytes, standard input a word to say at the
# end, by which a program that leaves early is found. The hook stays for good: Python has no way to take one off.
_LAUNCHER: Final = r"""
import os, resource, sys
seconds, size, word = int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.readline()
for kind, limit in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size), (resource.RLIMIT_FSIZE, 1 << 24),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(kind, (limit, limit))
home = os.path.realpath(os.getcwd()) + os.sep
with open("program.py", encoding="utf-8") as file:
    code = compile(file.read(), "program.py", "exec")
REFUSED = (
    "_thread.start_new_thread", "ctypes.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system",
    "pty.", "resource.", "signal.pthread_kill", "socket.", "subprocess.",
)
CHANGING = (
    "os.chdir", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
    "os.truncate", "os.utime", "shutil.",
)
def is_inside(place):
    return os.path.realpath(os.fsdecode(place)).startswith(home)
def refuse(event, arguments):
    if event.startswith(REFUSED):
        raise PermissionError(event + " is not allowed here")
    writes = event == "open" and (set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & 3)
    places = arguments[:1] if writes else arguments if event.startswith(CHANGING) else ()
    for place in places:
        if isinstance(place, (str, bytes)) and not is_inside(place):
            raise PermissionError(event + " of " + repr(place) + ": only the working directory may be changed")
sys.argv[:], said, sys.stdout = ["program.py"], os.dup(1), open(os.devnull, "w")
os.dup2(sys.stdout.fileno(), 1)
sys.addaudithook(refuse)
exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
os.write(said, word)
"""


class Verdict(NamedTuple):
    """How a program ended, and the end of what it wrote to its error output."""

    outcome: Outcome
    told: str


def run_program(source: str, *, seconds: float = 10.0, megabytes: int = 1024) -> Verdict:
    """Run a Python program and return how it ended: ``passed`` if its last line was reached without an exception.

    It runs isolated (``python -I``) in an empty folder, with nothing of this process's environment, at most so many
    seconds and megabytes of address space; without child processes, ctypes and so numpy, network, or changes elsewhere.

    Args:
        source: The program, tests included.
        seconds: Of wall time.
        megabytes: Of address space.

    Source: ``tests/test_sandbox.py`` has endless loops, fork bombs, writes and connections.
    """
    word = secrets.token_hex(8).encode()
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        # Half of a surrogate pair is not UTF-8, and no program either.
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, str(int(seconds) + 1), str(megabytes << 20)],
            cwd=folder,
            env={"HOME": folder, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, told = process.communicate(word, timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", f"not done after {seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome: Outcome = "passed" if said == word and not process.returncode else "failed"
    return Verdict(outcome, told.decode(errors="replace")[-MAX_TOLD:])

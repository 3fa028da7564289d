"""Locks that another process holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER = """import fcntl, sys
file = open(sys.argv[1], "a")
getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX)
print(flush=True)
input()"""


@contextmanager
def locked(file: Path, kind: str = "lockf") -> Iterator[subprocess.Popen[bytes]]:
    """Let another process, which is returned, hold a lock of a file within the block, which then kills it."""
    command = [sys.executable, "-c", HOLDER, file, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()

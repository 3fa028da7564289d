"""Ranks of a launch and failed processes on this machine.

torchrun and ``accelerate launch`` give each process a folder, named by its local rank, from which they read why it
failed. Each process also writes its process id there, and removes it when it ends normally.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final

from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record

_PID_FILE: Final = "pid"
_POLL_SECONDS: Final = 0.1
# gloo and NCCL say so in an error of no type of its own.
_CONNECTION_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "Failed to recv, got 0 bytes",
)


def read_rank() -> int:
    """Return the rank of this process, as its launcher set it; 0 without one."""
    return _read_number("RANK", 0)


def read_world_size() -> int:
    """Return the world size: the number of processes, 1 without a launcher."""
    return _read_number("WORLD_SIZE", 1)


def verify_one_process(command: str) -> None:
    """Raise if a launcher has started several processes of a command that does everything in one.

    Raises:
        ConfigError: It has.
    """
    if (count := read_world_size()) > 1:
        raise ConfigError(Problem(command, f"{count} processes were started, and each would do all of it", "start one"))


def has_launcher() -> bool:
    """Return whether the parent of this process is torchrun or ``accelerate launch``."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def read_api_key() -> str | None:
    """Return the API key of endpoints, which is in the environment alone: no file, flag or log has it."""
    return os.environ.get("OPENAI_API_KEY") or None


def enter() -> None:
    """Write the process id where the other ranks look for it; does nothing without a launcher's folder."""
    _write(_PID_FILE, str(os.getpid()))


def leave() -> None:
    """Remove the process id, so that this process does not count as lost."""
    if (folder := _find_folder()) is not None:
        with suppress(OSError):
            (folder / _PID_FILE).unlink(missing_ok=True)


def record_failure(error: BaseException, *, is_unforeseen: bool) -> None:
    """Write the reason where the launcher reads it, so that its summary names the first cause.

    Args:
        error: Why this process ends.
        is_unforeseen: Whether the traceback belongs to the reason.

    Source: torch ``ErrorHandler.record_exception``, whose format this is.
    """
    words = f"{type(error).__name__}: {error}"
    callstack = "".join(traceback.format_exception(error)) if is_unforeseen else str(error)
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    _write("error.json", json.dumps({"message": {"message": words, "extraInfo": extra}}))


def find_lost() -> str | None:
    """Return which other process has died without ending normally, and why; ``None`` if all are alive."""
    folder = _find_folder()
    if folder is None:
        return None
    for file in sorted(folder.parent.glob(f"*/{_PID_FILE}")):
        try:
            os.kill(int(file.read_text()), 0)  # Signal 0 asks whether the process exists, and sends nothing.
        except ProcessLookupError:
            return f"process {file.parent.name} of this machine ended: {_read_reason(file.parent)}"
        except (OSError, ValueError):  # It has just left in order, or is not ours.
            continue
    return None


def explain_lost_connection(error: BaseException, seconds: float = 2.0) -> str | None:
    """Return which process has died if ``error`` reports a lost connection; else ``None``.

    Args:
        error: What a collective operation raised.
        seconds: How long to wait until the launcher has noticed who is gone.
    """
    words = str(error)
    if read_world_size() == 1:  # There is no peer: the words are those of a pipe or a socket of another kind.
        return None
    if not any(phrase in words for phrase in _CONNECTION_LOST):
        return None
    deadline = time.monotonic() + seconds
    while (lost := find_lost()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return lost or "another process ended: its own output says why"


def _read_number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:  # ``read_launch`` refuses it by name; until then an error must still be told.
        return default


def _find_folder() -> Path | None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file and Path(file).parent.is_dir() else None


def _write(name: str, text: str) -> None:
    """Write a file for launcher and ranks; the folder is on ``/tmp``, and a full one must not hide why a run ends."""
    if (folder := _find_folder()) is not None:
        with suppress(OSError):
            (folder / name).write_text(text)


def _read_reason(folder: Path) -> str:
    try:
        reason = str(read_record(folder / "error.json", {"message": dict})["message"]["message"])
    except (DataError, KeyError):
        return "it left no reason, so it was killed"
    return reason.splitlines()[0]

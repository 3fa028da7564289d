"""Rank and world size of a launch, usable cores, and detection of failed processes on this machine.

torchrun and ``accelerate launch`` give each process a folder, named by its local rank, from which they read its error
(``error.json``). Each process also writes its process id there, and removes it when it ends normally.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import EXIT_BUG, ConfigError, DataError, Problem
from recipes_lib.files import read_record, replace_text

logger = logging.getLogger(__name__)

_PID_FILE: Final = "pid"
_FAILURE_KEY: Final = "recipes_lib/failure"
_SECONDS_TO_TELL: Final = timedelta(seconds=1)
_POLL_SECONDS: Final = 0.1
_CGROUP: Final = Path("/sys/fs/cgroup")
_CPU_QUOTAS: Final = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files of cgroup v2 and v1: microseconds of CPU time per period, ``max`` or -1 without a limit, and the period."""
# Messages of gloo and NCCL, which raise a plain RuntimeError.
_CONNECTION_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exiting",
    "Failed to recv, got 0 bytes",
)
# Messages of gloo, NCCL and torch's store.
_TIMED_OUT: Final = ("Timed out waiting", "operation timeout", "waiting for clients", "wait timeout after")


def count_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or the quota of its container if less."""
    quota = _read_quota()
    return _count_affinity() if quota is None else min(_count_affinity(), quota)


def limit_threads() -> None:
    """Limit the threads of OpenMP, in torch and NumPy, to the CPU quota of a container; call it before their import.

    They start one per core of the machine, and each parallel region then waits for threads that the kernel has
    suspended: on half a core, products of small matrices are 17 times slower with two threads than with one.
    """
    quota, threads = _read_quota(), os.environ.get("OMP_NUM_THREADS")
    if quota is None or quota >= _count_affinity():
        return
    share = max(1, quota // max(1, _read_number("LOCAL_WORLD_SIZE", 1)))
    # accelerate sets it to the cores of the machine. A value that is no number is an error of the start checks.
    if threads is None or (threads.isdecimal() and int(threads) > share):
        os.environ["OMP_NUM_THREADS"] = str(share)


def ignore_missing_plot_backend() -> None:
    """Unset the backend of a notebook's kernel in another environment, with which matplotlib cannot be imported."""
    _, _, module = os.environ.get("MPLBACKEND", "").partition("module://")
    if module and importlib.util.find_spec(module.split(".")[0]) is None:
        del os.environ["MPLBACKEND"]


def disable_tokenizer_threads() -> None:
    """Let tokenizers use one thread in this process: a forked worker, beside one on every other core.

    Otherwise it also warns, if it has used threads before the fork.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def disable_weight_conversion() -> None:
    """Make transformers load no Hub weights that a public service has converted to safetensors.

    They are of another commit than the recorded one, and the service is told the name of a private model.
    """
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"


def read_rank() -> int:
    """Return the rank of this process, from ``RANK``; 0 without a launcher."""
    return _read_number("RANK", 0)


def read_world_size() -> int:
    """Return the world size (the number of processes), from ``WORLD_SIZE``; 1 without a launcher."""
    return _read_number("WORLD_SIZE", 1)


def has_other_machines() -> bool:
    """Return whether processes of this run are on other machines too, connected by a store that the launcher hosts."""
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return has_store and _read_number("LOCAL_WORLD_SIZE", 1) < read_world_size()


def verify_one_process(command: str) -> None:
    """Raise if a launcher started several processes of a command that runs in one.

    Raises:
        ConfigError: The world size is above 1.
    """
    if (count := read_world_size()) > 1:
        raise ConfigError(Problem(command, f"{count} processes were started, and each would do all of it", "start one"))


def has_launcher() -> bool:
    """Return whether the parent of this process is torchrun or ``accelerate launch``."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def read_api_key() -> str | None:
    """Return the API key of endpoints from ``OPENAI_API_KEY``, the only place it is read from; ``None`` if unset."""
    return os.environ.get("OPENAI_API_KEY") or None


def register_process() -> None:
    """Write the process id for the other ranks of this machine; does nothing without a launcher's folder."""
    _write(_PID_FILE, str(os.getpid()))


def unregister_process() -> None:
    """Remove the process id: this process ends normally and does not count as lost."""
    if (folder := _find_folder()) is not None:
        with suppress(OSError):
            (folder / _PID_FILE).unlink()


def record_failure(error: BaseException, code: int) -> None:
    """Write ``error.json`` for the launcher, so that its summary names the first cause, and for the other ranks.

    Args:
        error: The error that ends this process.
        code: Its exit code; the traceback of a bug is included.

    Source: the format of ``torch.distributed.elastic``'s ``ErrorHandler``: ``record_exception`` and ``errorCode`` of
        ``override_error_code_in_rootcause_data``.
    """
    words = f"{type(error).__name__}: {error}"
    callstack = "".join(traceback.format_exception(error)) if code == EXIT_BUG else str(error)
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    _write("error.json", json.dumps({"message": {"message": words, "errorCode": code, "extraInfo": extra}}))


def read_failure_code() -> int:
    """Return the exit code of the first rank that recorded its failure, on any machine; ``EXIT_BUG`` if none did."""
    folder = _find_folder()
    for file in sorted(folder.parent.glob("*/error.json")) if folder else ():
        with suppress(DataError, KeyError):
            return int(read_record(file, {"message": dict})["message"]["errorCode"])
    failure = await_failure(_SECONDS_TO_TELL)
    return EXIT_BUG if failure is None else failure[0]


def tell_other_machines(error: BaseException, code: int) -> None:
    """Store why this process ends for ``await_failure`` of other machines; does nothing without any."""
    if has_other_machines():
        words = (str(error).splitlines() or [""])[0]
        text = f"{code} rank {read_rank()} on {platform.node()} ended: {type(error).__name__}: {words}"
        text = text.encode(errors="backslashreplace").decode()  # Paths may have bytes that are not UTF-8.
        with suppress(Exception):  # As without torch, or after the end of the launcher of machine 0.
            _open_store().compare_set(_FAILURE_KEY, "", text)  # Only the first.


def await_failure(timeout: timedelta) -> tuple[int, str] | None:
    """Wait until a process of any machine fails; return its exit code, and which one it is and why.

    Returns ``None`` after the timeout, or if the launcher of machine 0 has ended, or this is the only machine.
    """
    if has_other_machines():
        with suppress(RuntimeError):  # The errors of the store.
            code, _, words = _open_store(timeout).get(_FAILURE_KEY).decode().partition(" ")
            return int(code), words
    return None


def _open_store(timeout: timedelta = timedelta(minutes=1)) -> Any:
    # By name: errors in the configuration import torch only if there are other machines, which wait for this process.
    store, _, _ = next(importlib.import_module("torch.distributed.rendezvous").rendezvous("env://", timeout=timeout))
    return store


def is_first_to_report(words: str) -> bool:
    """Return whether no other process of this machine has printed the same error; true without a launcher's folder."""
    if (folder := _find_folder()) is None:
        return True
    try:
        # ``ascii``: paths may have bytes that are not UTF-8.
        digest = hashlib.sha256(ascii(words).encode()).hexdigest()[:16]
        (folder.parent / f"reported-{digest}").touch(exist_ok=False)
    except OSError as error:  # Without the file, as with a full ``/tmp``, the error is printed again.
        return not isinstance(error, FileExistsError)
    return True


@cache
def warn_once(words: str) -> None:
    """Log a warning that no process of this machine has logged."""
    if is_first_to_report(words):
        logger.warning(words)


def find_dead_process() -> str | None:
    """Return which process of this machine has died, and why; ``None`` if all are alive or ended normally."""
    for folder, pid in _list_registered():
        try:
            os.kill(pid, 0)  # Signal 0 only tests whether the process exists.
        except ProcessLookupError:
            return f"process {folder.name} of this machine ended: {_read_reason(folder)}"
        except OSError:  # It belongs to another user.
            continue
    return None


def explain_lost_connection(error: BaseException, seconds: float = 2.0) -> str | None:
    """Return which process has died or hangs if ``error`` reports a lost or silent connection; else ``None``.

    Afterwards, the other ranks do not take the end of this process for the cause.

    Args:
        error: Error of a collective operation.
        seconds: Time to wait for the other process's ``error.json`` or its end, and for ranks that wait as this one.
    """
    words = str(error)
    if read_world_size() == 1:  # Without peers, the message is that of another pipe or socket.
        return None
    is_silent = any(phrase in words for phrase in _TIMED_OUT)
    if not is_silent and not any(phrase in words for phrase in _CONNECTION_LOST):
        return None
    unregister_process()
    deadline = time.monotonic() + seconds
    while (lost := find_dead_process()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if lost is None and is_silent:
        # Ranks that wait as this one have come here too: those still registered do something else.
        others = ", ".join(f"{folder.name} (pid {pid})" for folder, pid in _list_registered())
        name = f"process {others} of this machine" if others else "another process"
        return f"{name} has not answered in time ({words.splitlines()[0]}): it hangs, or raise ddp_timeout"
    if lost is None and (failure := await_failure(_SECONDS_TO_TELL)) is not None:
        lost = failure[1]
    # gloo's first sentence has the address of its machine.
    return lost or f"another process ended: see its output for the reason ({words.partition('. ')[0].splitlines()[0]})"


def _count_affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_quota() -> int | None:
    """Return the whole cores of the container's CPU quota, at least 1; ``None`` without a quota."""
    for names in _CPU_QUOTAS:
        with suppress(OSError, ValueError, ZeroDivisionError):  # No such file, no number without a limit, or no period.
            texts = [(_CGROUP / name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(texts).split())
            return max(1, quota // period) if quota > 0 else None
    return None


def _read_number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:  # ``read_launch`` reports it; errors before that must still be printed.
        return default


def _find_folder() -> Path | None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def _list_registered() -> Iterator[tuple[Path, int]]:
    """Yield folder and process id of the processes of this machine that have not ended normally."""
    if (folder := _find_folder()) is not None:
        for file in sorted(folder.parent.glob(f"*/{_PID_FILE}")):
            with suppress(OSError, ValueError):  # It has just ended normally.
                yield file.parent, int(file.read_text())


def _write(name: str, text: str) -> None:
    """Write a file for the launcher and other ranks; errors, such as a full ``/tmp``, must not hide why a run ends."""
    if (folder := _find_folder()) is not None:
        with suppress(OSError):
            replace_text(folder / name, text)


def _read_reason(folder: Path) -> str:
    try:
        reason = str(read_record(folder / "error.json", {"message": dict})["message"]["message"])
    except (DataError, KeyError):
        return "no error was recorded, so it was killed"
    return reason.splitlines()[0]

"""Files on disk: atomic replacement, fsync, locks, SHA-256, and JSON records parsed as untrusted input."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import IO, Any, Final

from recipes_lib.errors import ConfigError, DataError, Problem

MAX_BYTES: Final = 1 << 28
"""Largest JSON record that is read, 256 MiB: far above any valid one, and a bound on an endless file."""

Fields = Mapping[str, type | UnionType]
"""Name -> type that a field of a record must have; ``None`` in a union allows it to be absent."""


def read_json(path: Path, *, remedy: str = "") -> Any:
    """Return the JSON value in a file.

    Args:
        path: Any path: one that names a folder, a pipe or a device is refused, not waited for.
        remedy: What the user may do about a file that cannot be read.

    Raises:
        DataError: The file cannot be read, or holds no JSON.
    """
    try:
        with _open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise OSError(f"its {size:,} bytes are more than a record has")
            return json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}", remedy) from error
    except RecursionError:
        raise _refuse(path, "is nested too deeply", remedy) from None
    except ValueError as error:  # No JSON, no UTF-8, or a number of thousands of digits.
        raise _refuse(path, f"is not JSON: {error}", remedy) from error


def read_record(path: Path, fields: Fields | None = None, *, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: As for ``read_json``.
        fields: Those that must be there, and their types; others may be there too.
        remedy: As for ``read_json``.

    Raises:
        DataError: As ``read_json``; or it is no object, or a field is missing or of another type.
    """
    record = read_json(path, remedy=remedy)
    if not isinstance(record, dict):
        raise _refuse(path, f"holds {'null' if record is None else _NAMES[type(record)]} and not an object", remedy)
    verify_fields(record, fields or {}, str(path), remedy=remedy)
    return record


def verify_fields(record: Mapping[str, Any], fields: Fields, where: str, *, remedy: str = "") -> None:
    """Raise if fields of a record are missing or have other types.

    Raises:
        DataError: Fields are missing or of another type: all are named.
    """
    wrong = [
        f"`{name}` is {_NAMES[type(record.get(name))]}" for name, kind in fields.items() if _is_not(record, name, kind)
    ]
    if wrong:
        raise DataError(Problem(where, "is not as it was written: " + ", ".join(wrong), remedy))


def spell_numbers(value: Any) -> Any:
    """Return a JSON value in which NaN and infinities, for which JSON has no numbers, are strings such as ``nan``."""
    if isinstance(value, Mapping):
        return {name: spell_numbers(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [spell_numbers(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_number(value: Any) -> float | None:
    """Parse a number of a record, as ``spell_numbers`` stores it; ``None`` if it is not a number."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object on each line of a file; ``None`` for an invalid line, such as one truncated by a kill.

    Nothing comes from a file that is missing. Empty lines are left out. The file may have any size.
    """
    # As bytes, which are split at line feeds alone: text is also split at characters that JSON strings may hold.
    with suppress(OSError), _open_regular(path) as file:
        # A bound on a line, not on the file: one without line feeds comes in invalid pieces, and fills no memory.
        for line in iter(partial(file.readline, MAX_BYTES), b""):
            if line.strip():
                yield parse_record(line.decode(errors="replace"))


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the JSON object on a line; ``None`` where there is none."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    return record if isinstance(record, dict) else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block succeeds, the file is flushed and renamed to ``path``.

    Another process that does the same at the same time writes a file of its own.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        let_readers_of_folder_read(unfinished)
        # Before the rename, which a file system may otherwise persist before the data.
        fsync(unfinished)
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextmanager
def writing(place: Path, remedy: str, found: str = "cannot be written") -> Iterator[None]:
    """Tell a file or folder that the system does not let the block write as the user's problem.

    Raises:
        ConfigError: The block raised an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(Problem(str(place), f"{found}: {error.strerror}", remedy)) from error


def refuse_full(folder: Path) -> None:
    """Raise unless a folder can be made, or is empty.

    Raises:
        ConfigError: It holds something, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(Problem(str(folder), "is not empty", "name another folder"))


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder``, which becomes it, flushed, when the block succeeds; else it goes.

    Raises:
        OSError: It cannot be made, or ``folder`` holds something.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as staging:
        built = Path(staging) / folder.name
        built.mkdir()
        yield built
        for file in built.rglob("*"):
            if file.is_file():
                let_readers_of_folder_read(file)
                fsync(file)
        built.replace(folder)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it holds the old text or the new one, never a part.

    Raises:
        OSError: It cannot be written; its ``filename`` is ``path``, and the old file is as it was.
    """
    # One name for every process, unlike in ``replacing``: these files have one writer, and what a killed one has left
    # is overwritten by the next, not collected.
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        fsync(unfinished)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        # A failed write names no file, and a failed rename the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_record(path: Path, record: Any) -> None:
    """Replace a JSON file atomically, with fsync; values of other types are written as strings.

    Raises:
        OSError: As ``replace_text``.
    """
    # In ASCII: a path whose name is no UTF-8 has characters that no encoding writes.
    replace_text(path, json.dumps(record, indent=1, default=str))


def let_readers_of_folder_read(file: Path) -> None:
    """Give a file the read permissions of its folder: safetensors 0.8 writes files that their owner alone may read."""
    # By the folder, which was made under the umask: that is read only by setting it, which other threads would see.
    with suppress(OSError):  # A file system without permissions.
        file.chmod(stat.S_IMODE(file.stat().st_mode) | file.parent.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    # What is flushed is the file, not the descriptor: one that is opened afterwards flushes what others wrote.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(file: Path | BufferedReader) -> str:
    """Return the SHA-256 of a file's bytes, 64 hex digits.

    Args:
        file: Its path, or the file opened at its beginning.

    Raises:
        OSError: It cannot be read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return hash_file(opened)
    return hashlib.file_digest(file, "sha256").hexdigest()


def try_lock(file: IO[Any], *, of_process: bool = False, is_shared: bool = False, waits: bool = False) -> bool | None:
    """Lock an open file until it is closed or its process dies.

    Args:
        file: Open for writing, unless the lock is shared.
        of_process: Lock for this process alone, not for what it forks (``fcntl`` instead of ``flock``). Such a lock is
            lost when the process closes any descriptor of the file.
        is_shared: Allow other shared locks.
        waits: Wait for the lock.

    Returns:
        Whether it is locked now; ``False``: another holds it, ``None``: the file system has no locks.
    """
    # flock belongs to the open file, which children share; lockf to the process.
    lock = fcntl.lockf if of_process else fcntl.flock
    try:
        lock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def is_inside(name: Any) -> bool:
    """Return whether a path from a record is relative and stays inside its directory."""
    return isinstance(name, str) and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


_NAMES: Final = {
    type(None): "missing",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _is_not(record: Mapping[str, Any], name: str, kind: type | UnionType) -> bool:
    value = record.get(name)
    return not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)


@contextmanager
def _open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file; a named pipe is refused without waiting for its writer."""
    try:
        # O_NONBLOCK: opening a named pipe without a writer would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # A name with a zero byte.
        raise OSError(str(error)) from error
    try:
        # Of the open descriptor: between a check by name and the opening something else could take the name.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _refuse(path: Path, found: str, remedy: str) -> DataError:
    return DataError(Problem(str(path), found, remedy))

"""File I/O: atomic replacement, fsync, locks, SHA-256, and JSON records, which are read as untrusted input."""

from __future__ import annotations

import codecs
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import IO, Any, Final

from recipes_lib.errors import ConfigError, DataError, DivergedError, Problem, UserError, explain_refusal

MAX_BYTES: Final = 1 << 28
"""Maximum size of a JSON record or line, 256 MiB: far above any valid one, it bounds memory on an untrusted file."""

LOCK_FILE: Final = "_lock"
"""File in an ``output_dir`` that the main process of a run holds locked; names with an underscore are not uploaded."""

Fields = Mapping[str, type | UnionType]
"""Field name -> type of its value; a union with ``None`` makes the field optional."""


def read_json(path: Path, *, remedy: str = "") -> Any:
    """Return the JSON value in a file.

    Args:
        path: Path of a regular file; a folder, a pipe or a device is an error.
        remedy: Remedy of the error, for the user.

    Raises:
        DataError: The file cannot be read, or is not valid JSON.
    """
    try:
        with _open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise OSError(f"its size of {size:,} bytes exceeds the limit of {MAX_BYTES:,}")
            return json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}", remedy) from error
    except RecursionError:
        raise _refuse(path, "is nested too deeply", remedy) from None
    except ValueError as error:  # Invalid JSON or UTF-8, or an integer above Python's limit of 4,300 digits.
        raise _refuse(path, f"is not JSON: {error}", remedy) from error


def read_text(path: Path, where: str, remedy: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark, which would become part of the first word.

    Args:
        path: Path of the file.
        where: Key or flag that names it, for the error.
        remedy: Remedy of the error.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(where, f"{path} cannot be read: {reason}", remedy)) from error


def read_record(path: Path, fields: Fields | None = None, *, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: Path of a regular file.
        fields: Required fields and their types; further fields are allowed.
        remedy: Remedy of the error, for the user.

    Raises:
        DataError: The file cannot be read, is not a JSON object, or has a missing field or one of another type.
    """
    record = read_json(path, remedy=remedy)
    if not isinstance(record, dict):
        raise _refuse(path, f"is {'null' if record is None else _NAMES[type(record)]} instead of an object", remedy)
    verify_fields(record, fields or {}, str(path), remedy=remedy)
    return record


def find_record(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none, or the file is damaged."""
    with suppress(DataError):
        return read_record(path)
    return {}


def name_record(path: Path) -> Path:
    """Return the path of the progress record of a file of rows; whatever renames the file renames its record too."""
    return path.with_name(f"{path.name}.record.json")


def verify_fields(record: Mapping[str, Any], fields: Fields, where: str, *, remedy: str = "") -> None:
    """Raise if fields of a record are missing or have other types.

    Args:
        record: A parsed JSON object.
        fields: Required fields and their types.
        where: Location of the record, for the error.
        remedy: Remedy of the error, for the user.

    Raises:
        DataError: A field is missing or of another type; names all such fields.
    """
    wrong = [
        f"`{name}` is {_NAMES[type(record.get(name))]}" for name, kind in fields.items() if _is_not(record, name, kind)
    ]
    if wrong:
        raise DataError(Problem(where, "has unexpected fields: " + ", ".join(wrong), remedy))


def spell_numbers(value: Any) -> Any:
    """Return a JSON value with NaN and infinities, which JSON lacks, as strings: ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, Mapping):
        return {name: spell_numbers(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [spell_numbers(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_number(value: Any) -> float | None:
    """Return the number that ``spell_numbers`` stored as ``value``; ``None`` if it is not a number."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def flatten_numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a nested record, as ``parse_number``, by their dotted names."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, f"{prefix}{name}.")
        elif (number := parse_number(value)) is not None:
            yield f"{prefix}{name}", number


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object on each line of a file; ``None`` for an invalid line, such as one truncated by a kill.

    A file that is missing or cannot be opened yields nothing; empty lines are skipped. Memory is bounded by the longest
    line, not by the file.

    Raises:
        OSError: The disk fails after the file was opened; ``filename`` is ``path``.
    """
    is_open = False
    try:
        with _open_regular(path) as file:
            is_open = True
            # Read as bytes, which are split at line feeds only. A line longer than the bound is read in pieces, which
            # are not valid JSON.
            for line in iter(partial(file.readline, MAX_BYTES), b""):
                if text := line.removeprefix(codecs.BOM_UTF8).strip():  # Programs on Windows begin files with the mark.
                    yield parse_record(text.decode(errors="replace"))
    except OSError as error:
        if is_open:  # The lines so far must not pass for the whole file.
            raise OSError(error.errno, error.strerror, str(path)) from error


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the JSON object on a line; ``None`` if the line is not a JSON object."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    return record if isinstance(record, dict) else None


@contextmanager
def atomic_file(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; if the block succeeds, the file is flushed and renamed to ``path``.

    Args:
        path: File to write or replace.
        is_shared: Whether several processes may write ``path`` at a time: their temporary files have different names,
            and the last rename wins. Otherwise the name is fixed, so that the file of a killed process is overwritten
            by the next one instead of accumulating.

    Raises:
        OSError: The file cannot be written; ``filename`` is ``path``, and the old file is unchanged.
    """
    # Random, not the process id: those of containers on a shared file system are often equal.
    name = f"{path.name}.{secrets.token_hex(4)}" if is_shared else path.name
    unfinished = path.with_name(f"{name}.partial")
    try:
        yield unfinished
        inherit_read_permission(unfinished)
        # Before the rename: a file system may persist the rename before the data.
        fsync(unfinished)
        unfinished.replace(path)
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(unfinished):
            raise
        # The error of a failed write has no file name (numpy's no number), that of a rename names the temporary file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


@contextmanager
def explain_write_errors(place: Path, remedy: str, found: str = "cannot be written") -> Iterator[None]:
    """Convert an ``OSError`` of the block to a ``ConfigError`` about ``place``.

    Args:
        place: File or folder that the block writes.
        remedy: Remedy of the error.
        found: Beginning of the message, before the system's reason.

    Raises:
        ConfigError: The block raised an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(Problem(str(place), f"{found}: {error.strerror or error}", remedy)) from error


@contextmanager
def staging_folder(place: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``place``, which is deleted after the block.

    The next call deletes the folder of a process that was killed.

    Args:
        place: File or folder that the block prepares; only one process does so at a time.

    Raises:
        ConfigError: Another process prepares ``place``, or the folder cannot be created.
    """
    staging = place.parent / f".{place.name}.partial"  # Not `with_name`, which raises for the root.
    lock = staging.with_name(f"{staging.name}.lock")
    with explain_write_errors(place, "name another place"):
        staging.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    with lock.open("a", encoding="utf-8") as file:
        if try_lock(file) is False:
            raise ConfigError(Problem(str(place), "is being written by another process", "wait until it ends"))
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            lock.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield the ``staging_folder`` of ``folder``, which is flushed and renamed to ``folder`` if the block succeeds.

    Raises:
        ConfigError: ``folder`` is a file or not empty, cannot be created, or another process writes it; or the block
            has failed for a reason of ``explain_refusal``.
    """
    folder = folder.resolve()  # A link keeps its place, and `.` gets a name.
    with staging_folder(folder) as staging:
        # Under the lock, and before the work of the block, which would be lost.
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(Problem(str(folder), "is not empty", "name another folder"))
        try:
            yield staging
        except (DivergedError, UserError):
            raise
        except Exception as error:  # On a full disk, those of transformers and tokenizers name no file.
            if refusal := explain_refusal(error, folder):
                raise ConfigError(refusal) from error
            raise
        for file in staging.rglob("*"):
            if file.is_file():
                inherit_read_permission(file)
                fsync(file)
        staging.replace(folder)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it contains the old or the new text, never a part.

    Raises:
        OSError: The file cannot be written; ``filename`` is ``path``, and the old file is unchanged.
    """
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def replace_record(path: Path, record: Any) -> None:
    """Replace a JSON file atomically, with fsync; values that JSON does not support are written as strings.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    # ASCII escapes (the default) also encode the lone surrogates of a path that is not valid UTF-8.
    replace_text(path, json.dumps(record, indent=1, default=str))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system does not support links.

    Raises:
        OSError: ``source`` is missing, or ``target`` cannot be written.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def inherit_read_permission(file: Path) -> None:
    """Give a file the group and world read permission of its folder: safetensors 0.8 creates files with mode 600."""
    # From the folder, which was created under the umask: reading the umask means setting it, for all threads.
    with suppress(OSError):  # A file system without permissions, such as FAT.
        file.chmod(stat.S_IMODE(file.stat().st_mode) | file.parent.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def remove_unfinished_weights(folder: Path) -> None:
    """Delete the weights of killed processes, as safetensors 0.8 names unfinished files: of any size, one for each."""
    for leftover in folder.glob(".tmp??????"):
        leftover.unlink(missing_ok=True)


def count_bytes(text: str) -> int:
    """Return the size of a text in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode())


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk; no effect if its file system does not support it.

    Raises:
        OSError: The disk is full or fails; ``filename`` is ``path``.
    """
    # fsync flushes the file, whichever descriptor wrote it.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support it for directories, and some FUSE file systems not at all.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def hash_file(file: Path | BufferedReader) -> str:
    """Return the SHA-256 of a file's bytes, 64 hex digits.

    Args:
        file: Path, or a file opened in binary mode at its beginning.

    Raises:
        OSError: The file cannot be read; ``filename`` is its path.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return hash_file(opened)
    try:
        return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error


def try_lock(file: IO[Any], *, of_process: bool = False, is_shared: bool = False, waits: bool = False) -> bool | None:
    """Lock an open file until it is closed or its process dies.

    Args:
        file: Open file; writable unless the lock is shared.
        of_process: Lock for this process only, without its forked children (``lockf`` instead of ``flock``). Such a
            lock is released when the process closes any descriptor of the file.
        is_shared: Take a shared lock instead of an exclusive one.
        waits: Block until the lock is available.

    Returns:
        ``True``: locked; ``False``: locked by another process, or deleted by it; ``None``: the file system does not
        support locks.
    """
    # A flock belongs to the open file description, which forked children share; a lockf to the process.
    lock = fcntl.lockf if of_process else fcntl.flock
    try:
        lock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    # Its last owner may have deleted it after this process had opened it: others would lock a new file of this name.
    return os.fstat(file.fileno()).st_nlink > 0


def is_locked(path: Path, *, of_process: bool = False) -> bool | None:
    """Return whether a process holds an exclusive lock of a file; ``None`` if the file or file system cannot tell.

    Args:
        path: The lock file, which may be untrusted; without it there is no holder.
        of_process: The kind of lock, as for ``try_lock``. Its holder must not ask: closing the file would unlock it.
    """
    try:
        with _open_regular(path) as file:
            # A shared lock, so that two processes that ask do not mistake each other for the holder.
            is_free = try_lock(file, of_process=of_process, is_shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if is_free is None else not is_free


def is_inside(name: Any) -> bool:
    """Return whether an untrusted path is relative and has no ``..`` part."""
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
    """Open a regular file for reading; raise ``OSError`` for anything else, without blocking on a named pipe."""
    try:
        # O_NONBLOCK: opening a named pipe without a writer would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # A path with a null byte.
        raise OSError(str(error)) from error
    try:
        # Check the descriptor, not the path, which may be replaced between a check and the opening.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _refuse(path: Path, found: str, remedy: str) -> DataError:
    return DataError(Problem(str(path), found, remedy))

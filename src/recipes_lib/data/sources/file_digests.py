"""SHA-256 of large files, cached between runs."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from recipes_lib.config.paths import expand_home
from recipes_lib.errors import DataError
from recipes_lib.files import hash_file, read_record, replace_record

MIN_BYTES: Final = 64 * 2**20
"""Smaller files are read every time: that takes a tenth of a second."""

_SETTLED_NS: Final = 2 * 10**9
"""A file that changed less than this ago may change again within the resolution of its clock."""


def compute_digest(path: Path, cache: Path | None = None) -> bytes:
    """Return the SHA-256 of a file's bytes, 32 bytes.

    That of a large file is kept under ``cache`` with the file's device, inode, size and times of change, and holds as
    long as all of these do. The time of the last status change (``ctime``) is among them, which no program can set
    back.

    Args:
        path: The file.
        cache: Folder of remembered digests. Default: ``~/.cache/recipes_lib/digests``; one that cannot be written is
            done without.

    Raises:
        OSError: The file cannot be read.
        ConfigError: It is large, and this user has no home folder.

    Source: ``hashlib.file_digest``; ``tests/data/sources/test_file_digests.py``.
    """
    with path.open("rb") as file:
        before = _describe(file.fileno())
        if before["size"] < MIN_BYTES:
            return bytes.fromhex(hash_file(file))
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        entry = (Path(expand_home("~/.cache/recipes_lib/digests")) if cache is None else cache) / f"{name}.json"
        remembered = _read(entry)
        if remembered.get("file") == before:
            return bytes.fromhex(str(remembered["sha256"]))
        digest = bytes.fromhex(hash_file(file))
        if _describe(file.fileno()) == before and time.time_ns() - before["ctime_ns"] > _SETTLED_NS:
            _write(entry, {"path": str(path), "file": before, "sha256": digest.hex()})
    return digest


def _describe(descriptor: int) -> dict[str, int]:
    status = os.fstat(descriptor)
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _read(entry: Path) -> dict[str, object]:
    try:
        content = read_record(entry, {"sha256": str})
        bytes.fromhex(content["sha256"])
    except (DataError, ValueError):
        return {}
    return dict(content)


def _write(entry: Path, content: dict[str, object]) -> None:
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        replace_record(entry, content)

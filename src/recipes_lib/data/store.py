"""Content-addressed store of prepared sets: built once under a lock, published by atomic rename, memory-mapped."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from recipes_lib.config.paths import expand_home, find_cache
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import fsync, hash_file, is_locked, read_record, replace_record, try_lock
from recipes_lib.processes import warn_once

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

logger = logging.getLogger(__name__)

COMPLETE_FILE = "COMPLETE.json"
MANIFEST_FILE = "manifest.json"
_BEAT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_SECONDS_TO_START = 120.0


class Rows(Protocol):
    """Protocol of rows with random access, such as a ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """A prepared set on disk.

    Attributes:
        path: Folder of the set.
        key: SHA-256 of everything that determines its content.
        manifest: JSON values: ``inputs`` of the key, and counts of ``train`` and ``eval``.
        is_new: Whether this process built the set; False if it existed.
    """

    path: Path
    key: str
    manifest: Mapping[str, Any]
    is_new: bool = False

    @property
    def train(self) -> datasets.Dataset:
        """Training rows, memory-mapped, as numpy arrays.

        Packs have the columns ``input_ids``, ``loss_mask``, ``seq_lengths`` and ``row_ids``; for those of pairs, see
        ``prepare_pairs``.
        """
        return open_rows(self.path, "train")

    @property
    def eval(self) -> datasets.Dataset | None:
        """Held-out rows in the same form; ``None`` if there are none."""
        return open_rows(self.path, "eval") if _data_file(self.path, "eval").exists() else None


def open_rows(folder: Path, split: str) -> datasets.Dataset:
    """Return the rows that ``write_splits`` has written, memory-mapped, as numpy arrays."""
    import datasets  # Slow to import, and not needed if only the manifest is read.

    return datasets.Dataset.from_file(str(_data_file(folder, split))).with_format("numpy")


def join_rows(rows: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """Concatenate the rows of two sets of the same kind; if only one of them has margins, they are 0 in the other."""
    import datasets  # Slow to import.

    parts = [rows, others]
    if any("margin" in part.column_names for part in parts):
        parts = [
            part if "margin" in part.column_names else part.add_column("margin", np.zeros(len(part), np.float32))
            for part in parts
        ]
    return datasets.concatenate_datasets(parts).with_format("numpy")


def find_root(config: RecipeConfig) -> Path:
    """Return the folder of prepared sets."""
    chosen = config.tokens.prepared_dir
    return Path(expand_home(chosen)) if chosen else find_cache("prepared")


def compute_key(inputs: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values in hexadecimal, independent of the order of keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def find_set(root: Path, key: str, *, check_bytes: bool = False) -> PreparedSet | None:
    """Return the complete set with a key; ``None`` if there is none, or a damaged one, which is logged.

    Args:
        root: Folder of prepared sets.
        key: Key from ``compute_key``.
        check_bytes: Whether to verify the SHA-256 of all files in addition to their sizes.

    Raises:
        DataError: The folder or a file in it cannot be opened or read.
    """
    path = _set_path(root, key)
    try:
        complete = read_record(path / COMPLETE_FILE, {"files": dict, "key": str})
        manifest = read_record(path / MANIFEST_FILE)
        files = complete["files"].items()
        intact = complete["key"] == key and all(_is_intact(path / name, entry, check_bytes) for name, entry in files)
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        with explain_disk_errors(root):
            raise_read_failure(error)
            if not path.exists():
                return None
        intact = False
    if not intact:
        # Once, since processes that wait for the new set look for it twice a second.
        warn_once(f"The prepared set {path} is damaged; it will be built again.")
        return None
    return PreparedSet(path, key, manifest)


def raise_read_failure(error: BaseException) -> None:
    """Raise the cause of ``error`` that is of a file that exists but cannot be read, and so need not be damaged.

    Raises:
        OSError: There is one: the disk fails, or the file is of another user.
    """
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT, errno.ENOTDIR):
            raise cause


def make_set(
    root: Path,
    key: str,
    inputs: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    local_rank: int = 0,
    resumes: bool = False,
    check_bytes: bool = False,
) -> PreparedSet:
    """Find the set of a key, or build and publish it, atomically and once for all processes.

    Needs no process group. If another machine publishes the same key in the meantime, its set is used.

    Args:
        root: Folder of prepared sets; created if missing.
        key: Key from ``compute_key(inputs)``.
        inputs: Everything that determines the content; part of the manifest.
        build: Function that writes the files of the set into the given folder, which it creates, and returns the other
            entries of the manifest.
        local_rank: Local rank of this process; all ranks but 0 wait for the set.
        resumes: Whether ``build`` can resume in the folder of a killed process; the folder is then kept after an error.
        check_bytes: As for ``find_set``.

    Raises:
        DataError: As ``build``; the disk is full, or ``root`` cannot be written; on other ranks, local rank 0 has not
            built the set.
    """
    if found := find_set(root, key, check_bytes=check_bytes):
        return found
    if local_rank:
        return wait_for_set(root, key)
    with hold_lock(root, key) as holds_lock:
        if found := find_set(root, key, check_bytes=check_bytes):  # Built by the previous holder of the lock.
            return found
        # Without a lock, two processes could write to the same folder.
        is_kept = resumes and holds_lock
        staging = choose_staging(root, key, is_kept=is_kept)
        try:
            manifest = {"key": key, "inputs": inputs, **build(staging)}
            with explain_disk_errors(root):
                published = publish_set(staging, root, key, manifest)
            is_kept = False  # The rename has moved the folder, unless another machine was first.
            return published
        finally:
            if not is_kept:
                shutil.rmtree(staging, ignore_errors=True)


def wait_for_set(root: Path, key: str) -> PreparedSet:
    """Wait until local rank 0 has published the set of a key, and return it.

    Args:
        root: Folder of prepared sets.
        key: Key from ``compute_key``.

    Raises:
        DataError: Local rank 0 failed, or has not started to build the set.
    """
    deadline, beat = time.monotonic() + _SECONDS_TO_START, 0
    while (prepared := find_set(root, key)) is None:
        # A held lock or a changed heartbeat shows that the set is being built, and restarts the timeout.
        locked, last, beat = is_locked(_lock_path(root, key)), beat, read_beat(root, key)
        if locked or beat != last:
            deadline = time.monotonic() + _SECONDS_TO_START
        elif time.monotonic() > deadline:
            found = "the first process of this node has not prepared the data"
            if locked is None:
                found += f", and had no heartbeat for {_SECONDS_TO_START:.0f} s (the file system has no locks)"
            raise DataError(Problem(str(root), found, "read its message, or run `recipes prepare` first"))
        time.sleep(_POLL_SECONDS)
    return prepared


def choose_staging(root: Path, key: str, *, is_kept: bool) -> Path:
    """Return the hidden folder under ``root`` in which a set is written before it is published.

    Args:
        root: Folder of prepared sets.
        key: Key from ``compute_key``.
        is_kept: Whether the folder has a fixed name, so that the next holder of the lock can resume in it; if not, the
            name is unique, and the next holder of the lock removes the folder if it is left behind.
    """
    return root / f".{_set_path(root, key).name}.{'partial' if is_kept else f'{uuid.uuid4().hex}.tmp'}"


def publish_set(staging: Path, root: Path, key: str, manifest: Mapping[str, Any]) -> PreparedSet:
    """Write the manifest of a prepared set, and atomically rename its folder to its key.

    If another process has published the same key in the meantime, its set is kept, unless its files do not have the
    recorded SHA-256.

    Args:
        staging: Folder of the set, under ``root``; files whose names start with a dot do not belong to the set.
        root: Folder of prepared sets.
        key: Key from ``compute_key``.
        manifest: JSON values.

    Raises:
        OSError: The disk is full, or ``root`` cannot be written.
    """
    target = _set_path(root, key)
    replace_record(staging / MANIFEST_FILE, manifest)
    # Without the record itself, and its temporary file, left by a killed process and replaced below.
    others = (".", COMPLETE_FILE)
    files = sorted(path for path in staging.rglob("*") if path.is_file() and not path.name.startswith(others))
    entries = {str(path.relative_to(staging)): _describe(path) for path in files}
    # Written last, with the size and SHA-256 of every other file: a folder without it is incomplete.
    replace_record(staging / COMPLETE_FILE, {"key": key, "files": entries})
    # The directory entries must be on disk before the rename makes the folder visible.
    for folder in sorted({path.parent for path in files}):
        fsync(folder)
    if find_set(root, key, check_bytes=True) is None:
        shutil.rmtree(target, ignore_errors=True)  # A damaged one.
        try:
            os.replace(staging, target)  # noqa: PTH105 - atomic, and refuses a folder that is not empty
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or find_set(root, key) is None:
                raise
    fsync(root)
    return PreparedSet(target, key, manifest, is_new=True)


@contextmanager
def hold_lock(root: Path, key: str) -> Iterator[bool]:
    """Hold the lock of a key while its set is built; the system releases it if the holder dies.

    On a file system without locks, no process waits: several may build the same set, and ``publish_set`` keeps one
    result. The lock file is then touched periodically, as a heartbeat for ``read_beat``.

    Yields:
        Whether the lock is held; False on a file system without locks.

    Raises:
        DataError: ``root`` cannot be created or written.
    """
    with explain_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        # Opening the file for writing updates its mtime, which is the first heartbeat.
        file = _lock_path(root, key).open("w")
    with file:
        is_held = try_lock(file)
        if is_held is False:
            logger.info("Another process is preparing the same data; waiting for it.")
            is_held = try_lock(file, waits=True)
        if not is_held:
            logger.info("%s is on a file system without locks.", root)
            with _beating(Path(file.name)):
                yield False
            return
        for leftover in root.glob(f".{_set_path(root, key).name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # From a killed process, since this one holds the lock.
        yield True


def read_beat(root: Path, key: str) -> int:
    """Return the heartbeat of a key's preparation: a number that changes while it is in progress; 0 if not started.

    Compare it with an earlier value, not with the local clock: that of a network file system may differ.
    """
    try:
        return _lock_path(root, key).stat().st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _beating(file: Path) -> Iterator[None]:
    """Touch a file periodically within the block, from a daemon thread, which stops if the process dies."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(file)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _set_path(root: Path, key: str) -> Path:
    return root / key[:16]


def _lock_path(root: Path, key: str) -> Path:
    return root / f".{key[:16]}.lock"


def _data_file(path: Path, split: str) -> Path:
    return path / split / "data.arrow"


def _is_intact(path: Path, entry: Mapping[str, Any], check_bytes: bool) -> bool:
    return path.stat().st_size == entry["size"] and (not check_bytes or _describe(path) == entry)


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": hash_file(path)}


def write_splits(staging: Path, splits: Mapping[str, pa.RecordBatchReader]) -> None:
    """Write the rows of each split as an Arrow stream, the format that ``PreparedSet`` reads.

    Args:
        staging: Folder of the set.
        splits: Rows by name of the split; consumed once.

    Raises:
        DataError: The disk is full, or the folder cannot be written.
    """
    import pyarrow as pa  # Slow to import, and needed only to build a set.

    with explain_disk_errors(staging.parent):
        for split, batches in splits.items():
            path = _data_file(staging, split)
            path.parent.mkdir(parents=True)
            with path.open("wb") as file, pa.ipc.new_stream(file, batches.schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
            fsync(path)


@contextmanager
def explain_disk_errors(root: Path) -> Iterator[None]:
    """Convert an ``OSError`` in the block to an error for the user.

    Raises:
        DataError: The disk is full, or ``root`` cannot be written.
    """
    try:
        yield
    except OSError as error:
        # numpy reports a full disk as "N requested and M written", without an error number.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)
        has_failed = error.errno in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
        otherwise = "check the disk (`dmesg`) and `ulimit -n`" if has_failed else "make the folder writable"
        remedy = "free some space" if is_full else otherwise
        found = f"the prepared set cannot be read or written: {error.strerror or error}"
        raise DataError(Problem(str(root), found, f"{remedy}, or set prepared_dir to another folder")) from error

"""Content-addressed store of prepared sets: built once under a lock, published atomically, memory-mapped."""

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
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import fsync, hash_file, read_record, replace_record, try_lock

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

logger = logging.getLogger(__name__)

COMPLETE_FILE = "COMPLETE.json"
MANIFEST_FILE = "manifest.json"
_BEAT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_SECONDS_TO_START = 120.0
_DEFAULT_ROOT = "~/.cache/recipes_lib/prepared"


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """A prepared set on disk.

    Attributes:
        path: Its folder.
        key: SHA-256 of everything that decides its content.
        manifest: ``inputs``: what went into the key; ``train`` and ``eval``: counts; written by ``prepare``.
        is_new: True when this process made it, False when it was found.
    """

    path: Path
    key: str
    manifest: Mapping[str, Any]
    is_new: bool = False

    @property
    def train(self) -> datasets.Dataset:
        """Training rows as numpy arrays, memory-mapped.

        Packs have ``input_ids``, ``loss_mask``, ``seq_lengths`` and ``row_ids``; for pairs see ``prepare_pairs``.
        """
        return self._load("train")

    @property
    def eval(self) -> datasets.Dataset | None:
        """Held-out rows, or ``None`` without any."""
        return self._load("eval") if _data_file(self.path, "eval").exists() else None

    def _load(self, split: str) -> datasets.Dataset:
        import datasets  # The import takes seconds, which a set that is only inspected does not need.

        return datasets.Dataset.from_file(str(_data_file(self.path, split))).with_format("numpy")


def join_rows(rows: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """Concatenate rows of two sets of one kind; a margin that only one of them has is 0 in the other."""
    import datasets  # as above

    parts = [rows, others]
    if any("margin" in part.column_names for part in parts):
        parts = [
            part if "margin" in part.column_names else part.add_column("margin", np.zeros(len(part), np.float32))
            for part in parts
        ]
    return datasets.concatenate_datasets(parts).with_format("numpy")


def find_root(config: RecipeConfig) -> Path:
    """Return the folder of prepared sets."""
    return Path(expand_home(config.tokens.prepared_dir or _DEFAULT_ROOT))


def compute_key(inputs: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def find_set(root: Path, key: str, *, check_bytes: bool = False) -> PreparedSet | None:
    """Return the complete set with that key, or ``None``; a damaged one counts as absent and is logged.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.
        check_bytes: Compare the files' SHA-256 too, not only their sizes.
    """
    path = _set_path(root, key)
    try:
        complete = read_record(path / COMPLETE_FILE, {"files": dict, "key": str})
        manifest = read_record(path / MANIFEST_FILE)
        damaged = [name for name, entry in complete["files"].items() if not _is_intact(path / name, entry, check_bytes)]
        intact = complete["key"] == key and not damaged
    except (DataError, OSError, ValueError, KeyError, TypeError):
        if not path.exists():
            return None
        intact = False
    if not intact:
        logger.warning("The prepared set %s is damaged; it will be made again.", path)
        return None
    return PreparedSet(path, key, manifest)


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

    Needs no process group. If another machine has published the same key in the meantime, its set is used.

    Args:
        root: Folder of prepared sets; made when missing.
        key: From ``compute_key`` and ``inputs``.
        inputs: What decides the content, for the manifest.
        build: Writes the files of the set into a folder, which it makes, and returns the rest of the manifest.
        local_rank: Rank on this node; all but the first wait for its set.
        resumes: Whether ``build`` resumes where a killed process stopped: its folder is kept while the key is locked.
        check_bytes: As for ``find_set``.

    Raises:
        DataError: As ``build``; the disk is full or ``root`` cannot be written; or, on the other ranks, that the first
            one gave up.
    """
    if found := find_set(root, key, check_bytes=check_bytes):
        return found
    if local_rank:
        return wait_for_set(root, key)
    with hold_lock(root, key) as is_locked:
        if found := find_set(root, key, check_bytes=check_bytes):  # Built by the process that held the lock before.
            return found
        is_kept = resumes and is_locked
        staging = choose_staging(root, key, is_kept=is_kept)
        try:
            manifest = {"key": key, "inputs": inputs, **build(staging)}
            with explain_disk_errors(root):
                published = publish_set(staging, root, key, manifest, check_bytes=check_bytes)
            is_kept = False  # It exists only if another machine has published its set in the meantime.
            return published
        finally:
            if not is_kept:
                shutil.rmtree(staging, ignore_errors=True)


def wait_for_set(root: Path, key: str) -> PreparedSet:
    """Return the set of that key, once the first process of the node has published it.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.

    Raises:
        DataError: That process gave up, or never began.
    """
    deadline, beat = time.monotonic() + _SECONDS_TO_START, 0
    while (found := find_set(root, key)) is None:
        # Either sign of life starts the time again; the number of seconds is that of a process that shows none.
        held, last, beat = is_locked(root, key), beat, read_beat(root, key)
        if held or beat != last:
            deadline = time.monotonic() + _SECONDS_TO_START
        elif time.monotonic() > deadline:
            found_problem = "the first process of this node has not prepared the data"
            if held is None:  # Only its heartbeat shows that it is working.
                found_problem += (
                    f", nor shown for {_SECONDS_TO_START:.0f} s that it is at work (files cannot be locked there)"
                )
            raise DataError(Problem(str(root), found_problem, "read its message, or run `recipes prepare` first"))
        time.sleep(_POLL_SECONDS)
    return found


def choose_staging(root: Path, key: str, *, is_kept: bool) -> Path:
    """Return the hidden folder under ``root`` in which a set is written.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.
        is_kept: Always the same one, so that who holds the lock may resume where another was killed; otherwise one of
            this call's own, which the next holder of the lock removes.
    """
    return root / f".{_set_path(root, key).name}.{'partial' if is_kept else f'{uuid.uuid4().hex}.tmp'}"


def publish_set(
    staging: Path, root: Path, key: str, manifest: Mapping[str, Any], *, check_bytes: bool = False
) -> PreparedSet:
    """Write the manifest of a prepared set, and atomically rename its folder to its key.

    If another process has published the same key in the meantime, its set is kept.

    Args:
        staging: The folder, under ``root``; files whose names begin with a dot do not belong to the set.
        root: Folder of prepared sets.
        key: From ``compute_key``.
        manifest: JSON values.
        check_bytes: Replace a set of that key whose bytes are not those that were written.

    Raises:
        OSError: The disk is full or ``root`` cannot be written.
    """
    target = _set_path(root, key)
    replace_record(staging / MANIFEST_FILE, manifest)
    files = sorted(path for path in staging.rglob("*") if path.is_file() and not path.name.startswith("."))
    entries = {str(path.relative_to(staging)): _describe(path) for path in files if path.name != COMPLETE_FILE}
    # Last, with the size and digest of every other file: a folder without it is no set.
    replace_record(staging / COMPLETE_FILE, {"key": key, "files": entries})
    # The names of the files, before the rename makes the folder visible.
    for folder in sorted({path.parent for path in files}):
        fsync(folder)
    _publish(staging, target, key, check_bytes=check_bytes)
    fsync(root)
    return PreparedSet(target, key, manifest, is_new=True)


@contextmanager
def hold_lock(root: Path, key: str) -> Iterator[bool]:
    """Lock the preparation of a key; the system releases the lock when its holder dies.

    On a file system without locks there is no waiting: the work is done twice, and ``publish_set`` keeps one result.
    The file is touched as a heartbeat, which ``read_beat`` reads.

    Yields:
        Whether the key is locked.

    Raises:
        DataError: ``root`` cannot be made or written.
    """
    with explain_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        # Opening it for writing changes its time: the first beat, also where locks are not supported.
        file = _lock_path(root, key).open("w")
    with file:
        is_ours = try_lock(file)
        if is_ours is False:
            logger.info("Another process is preparing the same data; waiting for it.")
            is_ours = try_lock(file, waits=True)
        if not is_ours:
            logger.info("%s is on a file system without locks.", root)
            with _beating(Path(file.name)):
                yield False
            return
        for leftover in root.glob(f".{_set_path(root, key).name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # Left by a killed process.
        yield True


def is_locked(root: Path, key: str) -> bool | None:
    """Return whether a living process holds the key's lock; ``None`` on a file system without locks."""
    try:
        file = _lock_path(root, key).open()
    except OSError:
        return False
    with file:
        # Shared, so that two waiting processes do not take each other for the holder.
        is_free = try_lock(file, is_shared=True)
    return None if is_free is None else not is_free


def read_beat(root: Path, key: str) -> int:
    """Heartbeat of the preparation of a key, for file systems without locks: a number that changes while it works.

    Compare it with its earlier value, never with a clock: the file system has another one. 0: not started.
    """
    try:
        return _lock_path(root, key).stat().st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _beating(file: Path) -> Iterator[None]:
    """Touch a file periodically within the block; it stops when the process dies."""
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
    if path.stat().st_size != entry["size"]:
        return False
    return not check_bytes or _describe(path) == entry


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": hash_file(path)}


def _publish(staging: Path, target: Path, key: str, *, check_bytes: bool) -> None:
    """Rename ``staging`` to ``target`` unless a complete set exists; a damaged one is replaced."""
    if find_set(target.parent, key, check_bytes=check_bytes) is not None:
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(staging, target)  # noqa: PTH105 - atomic, and refuses a folder that is not empty
    except OSError as error:
        published_meanwhile = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and find_set(target.parent, key)
        if not published_meanwhile:
            raise


def write_splits(staging: Path, splits: Mapping[str, pa.RecordBatchReader]) -> None:
    """Write the rows of each split in the format of ``PreparedSet``.

    Args:
        staging: Folder of the set.
        splits: Rows by split name, read once.

    Raises:
        DataError: The disk is full or the folder cannot be written.
    """
    import pyarrow as pa  # Imported only if a set is built.

    with explain_disk_errors(staging.parent):
        for split, batches in splits.items():
            path = _data_file(staging, split)
            path.parent.mkdir(parents=True)
            with path.open("wb") as file:
                with pa.ipc.new_stream(file, batches.schema) as stream:
                    for batch in batches:
                        stream.write_batch(batch)
                os.fsync(file.fileno())


@contextmanager
def explain_disk_errors(root: Path) -> Iterator[None]:
    """Convert disk errors under ``root`` to an error for the user.

    Raises:
        DataError: The disk is full or ``root`` cannot be written.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, or set" if is_full else "make the folder writable, or set"
        found = f"the prepared set cannot be written: {error.strerror or error}"
        raise DataError(Problem(str(root), found, f"{remedy} prepared_dir to another folder")) from error

"""Content-addressed storage of prepared sets: atomic, memory-mapped."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes_lib.data.packed.packing import Bins, Examples
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import fsync, hash_file, read_record, try_lock

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

logger = logging.getLogger(__name__)

COMPLETE_FILE = "COMPLETE.json"
MANIFEST_FILE = "manifest.json"
_PACKS_PER_RECORD_BATCH = 1000
_BEAT_SECONDS = 10.0


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
        """Rows to train on as numpy arrays, memory-mapped.

        Packs have ``input_ids``, ``loss_mask``, ``seq_lengths`` and ``row_ids``; for pairs see ``pair_sets``.
        """
        return self._load("train")

    @property
    def eval(self) -> datasets.Dataset | None:
        """Held-out rows, or ``None`` when nothing is held out."""
        return self._load("eval") if _data_file(self.path, "eval").exists() else None

    def _load(self, split: str) -> datasets.Dataset:
        import datasets  # seconds that a set which is only looked at does not need

        return datasets.Dataset.from_file(str(_data_file(self.path, split))).with_format("numpy")


def compute_key(inputs: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def find_set(root: Path, key: str, *, check_bytes: bool = False) -> PreparedSet | None:
    """The complete set of that key, or ``None``; a damaged one counts as absent and is named in the log.

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


def write_set(
    root: Path, key: str, splits: Mapping[str, tuple[Examples, Bins]], manifest: Mapping[str, Any]
) -> PreparedSet:
    """Writes a set of packs, as ``write_tables`` does.

    Args:
        root: Folder of prepared sets; made when missing.
        key: From ``compute_key``.
        splits: Examples and their packs by split name.
        manifest: JSON values.

    Raises:
        DataError: The disk is full or ``root`` cannot be written; nothing is left behind.
    """
    tables = {split: _read_packs(examples, bins) for split, (examples, bins) in splits.items()}
    return write_tables(root, key, tables, manifest)


def write_tables(
    root: Path, key: str, splits: Mapping[str, pa.RecordBatchReader], manifest: Mapping[str, Any]
) -> PreparedSet:
    """Writes a set beside its place and moves it there in one step, so that it is there whole or not at all.

    Should another process have published the same key meanwhile, its set is kept.

    Args:
        root: Folder of prepared sets; made when missing.
        key: From ``compute_key``.
        splits: Rows by split name, read once.
        manifest: JSON values.

    Raises:
        DataError: The disk is full or ``root`` cannot be written; nothing is left behind.
    """
    staging = choose_staging(root, key, is_kept=False)
    with explain_disk_errors(root):
        try:
            for split, batches in splits.items():
                _write_split(_data_file(staging, split), batches)
            return publish_set(staging, root, key, manifest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def choose_staging(root: Path, key: str, *, is_kept: bool) -> Path:
    """The folder, hidden under ``root``, in which a set is written.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.
        is_kept: Always the same one, so that who holds the lock may go on where another was killed; otherwise one of
            this call's own, which the next holder of the lock removes.
    """
    return root / f".{_set_path(root, key).name}.{'partial' if is_kept else f'{uuid.uuid4().hex}.tmp'}"


def publish_set(staging: Path, root: Path, key: str, manifest: Mapping[str, Any]) -> PreparedSet:
    """Seals a folder of files and moves it to the place of its key in one step.

    Should another process have published the same key meanwhile, its set is kept.

    Args:
        staging: The folder, under ``root``; files whose names begin with a dot are no part of the set.
        root: Folder of prepared sets.
        key: From ``compute_key``.
        manifest: JSON values.

    Raises:
        OSError: The disk is full or ``root`` cannot be written.
    """
    target = _set_path(root, key)
    write_json(staging / MANIFEST_FILE, manifest)
    files = sorted(path for path in staging.rglob("*") if path.is_file() and not path.name.startswith("."))
    entries = {str(path.relative_to(staging)): _describe(path) for path in files if path.name != COMPLETE_FILE}
    write_json(staging / COMPLETE_FILE, {"key": key, "files": entries})
    for folder in sorted({path.parent for path in files}):
        sync_folder(folder)
    _publish(staging, target, key)
    sync_folder(root)
    return PreparedSet(target, key, manifest, is_new=True)


@contextmanager
def hold_lock(root: Path, key: str) -> Iterator[bool]:
    """Keeps other processes from preparing the same key; the system frees the lock when its holder dies.

    On a file system without locks nobody waits here: the work is done twice and ``publish_set`` keeps one result. The
    file is touched for as long as it takes, which ``read_beat`` sees.

    Yields:
        Whether the key is locked.

    Raises:
        DataError: ``root`` cannot be made or written.
    """
    with explain_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
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
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
        yield True


def is_locked(root: Path, key: str) -> bool | None:
    """Whether a living process holds the key's lock; ``None`` on a file system without locks, where nobody knows."""
    try:
        file = _lock_path(root, key).open()
    except OSError:
        return False
    with file:
        is_free = try_lock(file, is_shared=True)
    return None if is_free is None else not is_free


def read_beat(root: Path, key: str) -> int:
    """A number that goes on changing while a process prepares the key on a file system without locks.

    To be compared with what it was, never with a clock: the file system's is another one. 0: nobody has begun.
    """
    try:
        return _lock_path(root, key).stat().st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _beating(file: Path) -> Iterator[None]:
    """Touches a file again and again while the block lasts, and not when its process is dead."""
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


def _publish(staging: Path, target: Path, key: str) -> None:
    """Moves ``staging`` to ``target`` unless a complete set is there already; a damaged one makes room."""
    if find_set(target.parent, key) is not None:
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(staging, target)  # noqa: PTH105 - atomic, and refuses a folder that is not empty
    except OSError as error:
        published_meanwhile = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and find_set(target.parent, key)
        if not published_meanwhile:
            raise


def _write_split(path: Path, batches: pa.RecordBatchReader) -> None:
    import pyarrow as pa  # only who prepares pays for it

    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        with pa.ipc.new_stream(file, batches.schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
        os.fsync(file.fileno())


def _read_packs(examples: Examples, bins: Bins) -> pa.RecordBatchReader:
    import pyarrow as pa

    starts = range(0, len(bins), _PACKS_PER_RECORD_BATCH)
    batches = (_build_record_batch(examples, bins, start, start + _PACKS_PER_RECORD_BATCH) for start in starts)
    return pa.RecordBatchReader.from_batches(_schema(), batches)


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        {
            "input_ids": pa.list_(pa.uint32()),
            "loss_mask": pa.list_(pa.bool_()),
            "seq_lengths": pa.list_(pa.int32()),
            "row_ids": pa.list_(pa.int64()),
        }
    )


def _build_record_batch(examples: Examples, bins: Bins, start: int, stop: int) -> pa.RecordBatch:
    import pyarrow as pa

    offsets = bins.offsets[start : stop + 1]
    packed = examples.take(bins.order[offsets[0] : offsets[-1]])
    documents = offsets - offsets[0]
    tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(packed.lengths)])[documents]
    columns = (
        (tokens, packed.input_ids),
        (tokens, packed.loss_mask),
        (documents, packed.lengths.astype(np.int32)),
        (documents, packed.row_ids),
    )
    arrays = [pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(values)) for ends, values in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=_schema())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON values, and returns when they are on the disk."""
    with path.open("w") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Returns when the names of a folder's files are on the disk."""
    fsync(path)


@contextmanager
def explain_disk_errors(root: Path) -> Iterator[None]:
    """Turns what goes wrong with the disk under ``root`` into an error for the user.

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

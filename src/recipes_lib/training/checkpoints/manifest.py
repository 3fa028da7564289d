"""The checkpoint manifest ``COMPLETE.json``: completeness, integrity and retention.

A checkpoint is written to a folder under ``STAGING``. After fsync ``COMPLETE.json`` is written, then the folder is
renamed. Whenever a process dies, ``checkpoint-N`` is complete or absent.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import DataError
from recipes_lib.files import (
    Fields,
    fsync,
    hash_file,
    is_inside,
    let_readers_of_folder_read,
    read_record,
    replace_record,
)

COMPLETE: Final = "COMPLETE.json"
STAGING: Final = "_saving"
DRY_RUN: Final = "_rehearsal"
_TRASH: Final = "_deleted"
_NAME = re.compile(r"checkpoint-(\d+)")
_WRITERS: Final = (("shard-", 1), ("rng_state_", 0), ("zero_pp_rank_", 0))
"""What stands before the number of its writer in the name of a file that every process has, and the first number."""
_NUM_READERS: Final = 4
"""Files that a process reads at a time where it does nothing else: hashing lets other threads run."""

_COUNTS: Final = (
    *("world_size", "data_size", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "steps_per_generation"),
)
_FIELDS: Final[Fields] = {
    "files": dict,
    **dict.fromkeys(("step", *_COUNTS), int | None),
    "engine": str | None,
    "run": dict | None,
}

Record = Mapping[str, Any]
"""Content of ``COMPLETE.json``."""


def find_writer(name: str) -> int:
    """Return the number of the process that writes a file of that name; what all hold is the first one's."""
    for words, first in _WRITERS:
        if match := re.search(rf"{words}(\d+)", name):
            return int(match[1]) - first
    return 0


def flush_files(checkpoint: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Flush the files that a process wrote to the disk, and return ``size`` and ``sha256`` of each by its name.

    What is hashed is what they say when they are read again. SHA-256, because processors compute it faster than BLAKE2
    and ``sha256sum`` is on every machine.

    Args:
        checkpoint: Folder with every file of the checkpoint in place.
        rank: Number of this process, of those that do the same.
        world_size: How many those are.
    """
    described = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != COMPLETE and find_writer(path.name) % world_size == rank:
            let_readers_of_folder_read(path)
            fsync(path)
            described[str(path.relative_to(checkpoint))] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    return described


def write_complete(checkpoint: Path, files: Mapping[str, Any] | None = None, **facts: Any) -> None:
    """Complete a checkpoint: write ``COMPLETE.json`` with the sizes and hashes of its files, last.

    Args:
        checkpoint: Folder with every file of the checkpoint in place.
        files: From ``flush_files``, of all processes; ``None``: this one flushes all.
        **facts: What else the record holds: ``step``, ``world_size``, ...; JSON values.
    """
    described = flush_files(checkpoint) if files is None else dict(sorted(files.items()))
    # An fsync of a file does not flush its directory entry: without this a power cut may lose the name.
    for folder in {(checkpoint / name).parent for name in described} - {checkpoint}:
        fsync(folder)
    # Last: its presence means that everything above is on the disk.
    replace_record(checkpoint / COMPLETE, {**facts, "files": described})
    fsync(checkpoint)


def read_complete(checkpoint: Path) -> Record | None:
    """Return the record of a checkpoint; ``None`` when there is none that could be read, or not as it was written."""
    with suppress(DataError):
        record = read_record(checkpoint / COMPLETE, _FIELDS)
        # A checkpoint may be untrusted: no divisor is 0, and no name leads out of the folder.
        numbers = (record.get(name) for name in _COUNTS)
        if all(number is None or number > 0 for number in numbers) and all(
            is_inside(name) and isinstance(file, dict) and {"size", "sha256"} <= file.keys()
            for name, file in record["files"].items()
        ):
            return record
    return None


def is_complete(checkpoint: Path) -> bool:
    """Return whether ``COMPLETE.json`` is there and every file it lists has the size it had; reads no file."""
    return find_wrong_size(checkpoint) is None


def find_wrong_size(checkpoint: Path) -> str | None:
    """Return the first file of a checkpoint that is missing or has another size, without reading; else ``None``."""
    record = read_complete(checkpoint)
    if record is None:
        return f"it has no readable {COMPLETE}"
    for name, expected in record["files"].items():
        try:
            status = (checkpoint / name).stat()
        except OSError as error:
            return _tell_unreadable(name, error)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file"
        if status.st_size != expected["size"]:
            return f"{name} has {status.st_size} bytes and not {expected['size']}"
    return None


def find_damage(checkpoint: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Verify all hashes of a checkpoint; return the fault with the file name, ``None`` if there is none.

    Args:
        checkpoint: Its folder.
        rank: Number of this process, of those that do the same and share the files out.
        world_size: How many those are.
    """

    def find_change(file: tuple[str, Mapping[str, Any]]) -> str | None:
        name, expected = file
        try:
            is_whole = hash_file(checkpoint / name) == expected["sha256"]
        except OSError as error:
            return _tell_unreadable(name, error)
        return None if is_whole else f"{name} holds other bytes than were written"

    # Sizes first: they cost no reading, and most damage, a copy that was cut off, shows in them.
    if (wrong := find_wrong_size(checkpoint)) is not None:
        return wrong
    record = read_complete(checkpoint)
    assert record is not None, "it was complete a moment ago"
    # By size, so that large files are spread evenly over the ranks.
    by_size = sorted(record["files"].items(), key=lambda file: file[1]["size"], reverse=True)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return next(filter(None, pool.map(find_change, by_size[rank::world_size])), None)


def publish(staged: Path) -> Path:
    """Rename a complete checkpoint to its final name, replacing an older one of the same step."""
    output_dir = staged.parent.parent
    checkpoint = output_dir / staged.name
    # POSIX renames onto an existing folder only if that is empty, so an older one of this step moves away first.
    _move_to_trash(checkpoint)
    staged.rename(checkpoint)
    with suppress(OSError):  # It holds others that are complete.
        staged.parent.rmdir()
    # The rename is durable only after this; only then may the older checkpoint be deleted.
    fsync(output_dir)
    clear_trash(output_dir)
    return checkpoint


def clear_leftovers(output_dir: Path) -> None:
    """Remove incomplete checkpoints of a process that died; complete ones get their names."""
    # Killed between manifest and rename. As a list, because the folder changes while it is read.
    for staged in list((output_dir / STAGING).glob("checkpoint-*")):
        if is_complete(staged):
            publish(staged)
    for name in (STAGING, DRY_RUN, _TRASH):
        shutil.rmtree(output_dir / name, ignore_errors=True)


def find_last_complete(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; ``None`` when there is none.

    Source: replaces transformers ``get_last_checkpoint``, which takes half-written folders;
    see ``tests/training/checkpoints/test_manifest.py``.
    """
    return next((path for _, path in list_checkpoints(output_dir) if is_complete(path)), None)


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, complete or not, the newest first."""
    numbered = [
        (int(match[1]), path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(numbered, reverse=True)


def rotate(
    output_dir: Path, keep_last: int | None, keep_steps: Collection[int], keep_every: int | None = None
) -> list[str]:
    """Delete all but the newest complete checkpoints; call it when the newest one has its manifest, never before.

    What is not complete is neither counted nor deleted: it may be all that is left of something.

    Args:
        output_dir: Where the checkpoints are.
        keep_last: Complete checkpoints to keep; ``None`` keeps all.
        keep_steps: Steps whose checkpoints stay besides.
        keep_every: Also keep the checkpoints at multiples of this many steps.

    Returns:
        Those that could not be deleted, each with the reason.
    """
    kept: list[str] = []
    if keep_last is None:
        return kept
    complete = [(step, path) for step, path in list_checkpoints(output_dir) if is_complete(path)]
    for step, path in complete[keep_last:]:
        if step not in keep_steps and not (keep_every and step % keep_every == 0):
            try:
                _move_to_trash(path)
            except OSError as error:
                kept.append(f"{path.name} ({error.strerror})")
    clear_trash(output_dir)
    return kept


def supersede(output_dir: Path, after_step: int) -> None:
    """Rename the checkpoints after a step, so that they are never resumed."""
    for step, path in list_checkpoints(output_dir):
        if step > after_step:
            put_aside(path, "superseded")


def put_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint so that it is ignored, and return its path; it replaces one that was put aside before it."""
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def clear_trash(output_dir: Path) -> None:
    """Delete the folders that were moved to the trash."""
    shutil.rmtree(output_dir / _TRASH, ignore_errors=True)


def _move_to_trash(path: Path) -> None:
    """Rename a folder before deleting it: a partly deleted checkpoint must not look complete."""
    # Beside it, on the same file system: a rename is one operation, and deleting many.
    trash = path.parent / _TRASH
    if path.exists():
        trash.mkdir(exist_ok=True)
        shutil.rmtree(trash / path.name, ignore_errors=True)
        path.rename(trash / path.name)


def _tell_unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read ({error.strerror})"

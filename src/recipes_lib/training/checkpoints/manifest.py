"""The checkpoint manifest ``COMPLETE.json``: completeness, integrity and retention.

A checkpoint is written to a folder under ``STAGING`` and flushed with fsync. Then ``COMPLETE.json`` is written, and the
folder is renamed to ``checkpoint-N``: if the process dies at any moment, ``checkpoint-N`` is complete or absent.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import Fields, fsync, hash_file, inherit_read_permission, is_inside, read_record, replace_record

COMPLETE: Final = "COMPLETE.json"
STAGING: Final = "_saving"
DRY_RUN: Final = "_dry_run"
_TRASH: Final = "_deleted"
_NAME = re.compile(r"checkpoint-([0-9]+)")
_WRITERS: Final = (("shard-", 1), ("rng_state_", 0), ("zero_pp_rank_", 0))
"""Prefix of the rank in names of per-rank files, and the number that rank 0 has there."""
_NUM_READERS: Final = 4
"""Files hashed concurrently on resume; hashlib releases the GIL."""

BATCH_KEYS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Keys whose product with the world size is the global batch size; only the product affects the result."""
GENERATION_KEY: Final = "steps_per_generation"
"""Key for the micro-batches whose answers are sampled together, if they differ from those of an optimizer step."""
_COUNTS: Final = ("world_size", "data_size", *BATCH_KEYS, GENERATION_KEY)
_FIELDS: Final[Fields] = {
    "files": dict,
    **dict.fromkeys(("step", *_COUNTS), int | None),
    "engine": str | None,
    "run": dict | None,
}

Record = Mapping[str, Any]
"""Content of ``COMPLETE.json``."""


def find_writer(name: str) -> int:
    """Return the rank that writes a file of this name; files without a rank in their name belong to rank 0."""
    for prefix, first in _WRITERS:
        if match := re.search(rf"{prefix}(\d+)", name):
            return int(match[1]) - first
    return 0


def flush_files(checkpoint: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Flush the files that a rank wrote, and return ``size`` in bytes and ``sha256`` of each by its relative path.

    Each file is read back and hashed. SHA-256: CPUs have instructions for it, and ``sha256sum`` can verify it.

    Args:
        checkpoint: Folder with all files of the checkpoint.
        rank: Rank of this process.
        world_size: Number of ranks that flush files.
    """
    described = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != COMPLETE and find_writer(path.name) % world_size == rank:
            inherit_read_permission(path)
            fsync(path)
            described[str(path.relative_to(checkpoint))] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    return described


def write_complete(checkpoint: Path, files: Mapping[str, Any] | None = None, **facts: Any) -> None:
    """Complete a checkpoint: write ``COMPLETE.json`` with the sizes and hashes of its files, last.

    Args:
        checkpoint: Folder with all files of the checkpoint.
        files: Merged results of ``flush_files`` from all ranks; ``None``: this process flushes all files.
        **facts: Further JSON values for the record, such as ``step`` and ``world_size``.
    """
    described = flush_files(checkpoint) if files is None else dict(sorted(files.items()))
    # An fsync of a file does not flush its directory entry: without this a power cut may lose the name.
    for folder in {(checkpoint / name).parent for name in described} - {checkpoint}:
        fsync(folder)
    # Last: its presence means that everything above is on the disk.
    replace_record(checkpoint / COMPLETE, {**facts, "files": described})
    fsync(checkpoint)


def read_complete(checkpoint: Path) -> Record | None:
    """Return the manifest of a checkpoint; ``None`` if it is missing, unreadable or invalid."""
    with suppress(DataError):
        record = read_record(checkpoint / COMPLETE, _FIELDS)
        # A checkpoint may be untrusted: reject counts of 0, which are divisors, and paths that leave the folder.
        numbers = (record.get(name) for name in _COUNTS)
        if all(number is None or number > 0 for number in numbers) and all(
            is_inside(name) and isinstance(file, dict) and {"size", "sha256"} <= file.keys()
            for name, file in record["files"].items()
        ):
            return record
    return None


def is_complete(checkpoint: Path) -> bool:
    """Return whether ``COMPLETE.json`` exists and every listed file has the recorded size; does not read the files."""
    return find_wrong_size(checkpoint) is None


def find_wrong_size(checkpoint: Path) -> str | None:
    """Return why a checkpoint is incomplete: the first file that is missing or has another size; ``None`` if complete.

    Compares sizes only; ``find_damage`` verifies hashes.
    """
    record = read_complete(checkpoint)
    if record is None:
        return f"it has no readable {COMPLETE}"
    number = _NAME.fullmatch(checkpoint.name)
    if number and record.get("step") not in (None, int(number[1])):
        return f"it was renamed: its {COMPLETE} is of step {record['step']}"
    for name, expected in record["files"].items():
        try:
            status = (checkpoint / name).stat()
        except (OSError, ValueError) as error:  # ValueError: the name cannot be encoded.
            return _describe_unreadable(name, error)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if status.st_size != expected["size"]:
            return f"{name} has {status.st_size} bytes instead of {expected['size']}"
    return None


def find_damage(checkpoint: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Verify this rank's share of the hashes of a checkpoint; return the first fault with its file name, or ``None``.

    Args:
        checkpoint: Checkpoint folder.
        rank: Rank of this process.
        world_size: Number of ranks that divide the files among themselves.
    """

    def find_change(file: tuple[str, Mapping[str, Any]]) -> str | None:
        name, expected = file
        try:
            is_whole = hash_file(checkpoint / name) == expected["sha256"]
        except OSError as error:
            return _describe_unreadable(name, error)
        return None if is_whole else f"{name} does not match its SHA-256"

    # Sizes first: they need no reading, and reveal the most common damage, a truncated copy.
    if (wrong := find_wrong_size(checkpoint)) is not None:
        return wrong
    record = read_complete(checkpoint)
    assert record is not None, "find_wrong_size has just read it"
    # Sorted by size, so that the large files are spread evenly over the ranks.
    by_size = sorted(record["files"].items(), key=lambda file: file[1]["size"], reverse=True)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return next(filter(None, pool.map(find_change, by_size[rank::world_size])), None)


def publish(staged: Path) -> Path:
    """Rename a complete checkpoint to its final name, replacing an older complete one of the same step.

    An incomplete one, such as of another program, is not this run's to delete: it is kept as ``replaced-checkpoint-N``.
    """
    output_dir = staged.parent.parent
    checkpoint = output_dir / staged.name
    # POSIX rename replaces a directory only if it is empty, so an older checkpoint of this step is moved away first.
    if checkpoint.exists() and not is_complete(checkpoint):
        put_aside(checkpoint, "replaced")
    _move_to_trash(checkpoint)
    staged.rename(checkpoint)
    with suppress(OSError):  # Fails if the staging folder holds other checkpoints.
        staged.parent.rmdir()
    # Makes the rename durable; the older checkpoint must not be deleted before.
    fsync(output_dir)
    clear_trash(output_dir)
    return checkpoint


def clear_leftovers(output_dir: Path) -> None:
    """Publish complete staged checkpoints of a killed process, and remove the rest of its temporary folders."""
    # Complete ones are left by a kill between manifest and rename. A list, because publishing changes the folder.
    for staged in list((output_dir / STAGING).glob("checkpoint-*")):
        if is_complete(staged):
            publish(staged)
    for name in (STAGING, DRY_RUN, _TRASH):
        shutil.rmtree(output_dir / name, ignore_errors=True)


def find_last_complete(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; ``None`` if there is none.

    Raises:
        ConfigError: A newer checkpoint cannot be read. To ignore it could repeat days of training.

    Source: replaces ``transformers.trainer_utils.get_last_checkpoint``, which accepts incomplete folders;
    ``tests/training/checkpoints/test_manifest.py``.
    """
    for _, path in list_checkpoints(output_dir):
        if is_complete(path):
            return path
        if problem := find_unreadable(path):
            raise ConfigError(problem)
    return None


def find_unreadable(checkpoint: Path) -> Problem | None:
    """Return why a file of a checkpoint exists but cannot be read, which is no damage; ``None`` if all can be."""
    names = (read_complete(checkpoint) or {"files": ()})["files"]
    for path in (checkpoint / name for name in (COMPLETE, *names)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                os.read(descriptor, 1)  # Opening needs no disk that works.
            finally:
                os.close(descriptor)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
            continue
        except OSError as error:
            remedy = "make it readable and run the same command; or delete its folder, to resume without it"
            return Problem(str(path), f"cannot be read: {error.strerror}", remedy)
    return None


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, complete or not, in descending order of steps."""
    # Not ``glob``, for which a folder that cannot be listed is empty: a run would begin again at step 0.
    paths = output_dir.iterdir() if output_dir.is_dir() else ()
    numbered = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted(numbered, reverse=True)


def rotate(
    output_dir: Path, keep_last: int | None, keep_steps: Collection[int], keep_every: int | None = None
) -> list[str]:
    """Delete all but the newest complete checkpoints; call only after the newest one has been published.

    Incomplete checkpoints are neither counted nor deleted, because the user may be able to salvage them.

    Args:
        output_dir: Output directory of the run.
        keep_last: Number of complete checkpoints to keep; ``None`` keeps all.
        keep_steps: Steps whose checkpoints are kept in addition.
        keep_every: Checkpoints at positive multiples of this many steps are kept in addition.

    Returns:
        Checkpoints that could not be deleted, each with the reason.
    """
    failures: list[str] = []
    if keep_last is None:
        return failures
    checkpoints = list_checkpoints(output_dir)
    newest = itertools.islice((step for step, path in checkpoints if is_complete(path)), keep_last)
    kept = {*newest, *keep_steps}
    for step, path in checkpoints:
        # ``is_complete`` last: it would read the sizes of all files of hundreds of permanent checkpoints at every save.
        if step not in kept and not (keep_every and step and step % keep_every == 0) and is_complete(path):
            try:
                _move_to_trash(path)
            except OSError as error:
                failures.append(f"{path.name} ({error.strerror})")
    clear_trash(output_dir)
    return failures


def supersede(output_dir: Path, after_step: int) -> list[Path]:
    """Rename all checkpoints after a step to ``superseded-checkpoint-N``, so that they are never resumed from.

    Returns:
        The renamed folders.
    """
    later = [path for step, path in list_checkpoints(output_dir) if step > after_step]
    for path in later:
        shutil.rmtree(path.with_name(f"superseded-{path.name}"), ignore_errors=True)
    return [put_aside(path, "superseded") for path in later]


def put_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to ``why-checkpoint-N``, or ``why-checkpoint-N-2`` if that exists, etc.; return the path."""
    name = f"{why}-{path.name}"
    candidates = (path.with_name(name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return path.rename(next(candidate for candidate in candidates if not candidate.exists()))


def clear_trash(output_dir: Path) -> None:
    """Delete the folders that were moved to the trash."""
    shutil.rmtree(output_dir / _TRASH, ignore_errors=True)


def _move_to_trash(path: Path) -> None:
    """Rename a folder before its deletion, which is not atomic: a kill must not leave half a ``checkpoint-N``."""
    # In the same folder, and so on the same file system: only there is a rename atomic.
    trash = path.parent / _TRASH
    if path.exists() or path.is_symlink():  # A link may be broken, as of a checkpoint that was moved to another disk.
        trash.mkdir(exist_ok=True)
        shutil.rmtree(trash / path.name, ignore_errors=True)
        path.rename(trash / path.name)


def _describe_unreadable(name: str, error: Exception) -> str:
    return f"{name} cannot be read ({getattr(error, 'strerror', error)})"

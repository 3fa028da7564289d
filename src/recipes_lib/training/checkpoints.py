"""Which checkpoints may be resumed: those whose last written file says that all the others are whole. Which stay.

A checkpoint grows in a folder under ``STAGING``. When all of it is on the disk, ``COMPLETE.json`` is written, and only
then does it get its name. Whatever the moment at which a process dies, ``checkpoint-N`` is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

COMPLETE: Final = "COMPLETE.json"
STAGING: Final = "_saving"
REHEARSAL: Final = "_rehearsal"
_TRASH: Final = "_deleted"
_NAME = re.compile(r"checkpoint-(\d+)")

Record = Mapping[str, Any]
"""Content of ``COMPLETE.json``."""


def write_complete(checkpoint: Path, **facts: Any) -> None:
    """Seal a checkpoint: flush its files to disk, then write ``COMPLETE.json`` with their sizes and hashes, last.

    SHA-256, because processors compute it faster than BLAKE2 and ``sha256sum`` is on every machine. What is hashed is
    what the files say when they are read again.

    Args:
        checkpoint: Folder with every file of the checkpoint in place.
        **facts: What else the record holds: ``step``, ``world_size``, ...; JSON values.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE)
    for path in files:
        _fsync(path)
    for folder in {path.parent for path in files} - {checkpoint}:
        _fsync(folder)
    described = {
        str(path.relative_to(checkpoint)): {"size": path.stat().st_size, "sha256": _hash(path)} for path in files
    }
    partial = checkpoint / f"{COMPLETE}.partial"
    partial.write_text(json.dumps({**facts, "files": described}, indent=1), encoding="utf-8")
    _fsync(partial)
    partial.rename(checkpoint / COMPLETE)
    _fsync(checkpoint)


def read_complete(checkpoint: Path) -> Record | None:
    """Return the record of a checkpoint; ``None`` when there is none that could be read."""
    try:
        record: Any = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
        is_record = all(file.keys() >= {"size", "sha256"} for file in record["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if is_record else None


def is_complete(checkpoint: Path) -> bool:
    """Return whether ``COMPLETE.json`` is there and every file it lists has the size it had; reads no file."""
    return _find_damage(checkpoint, reads=False) is None


def find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, after reading all of it; ``None`` when it is whole."""
    return _find_damage(checkpoint, reads=True)


def publish(staged: Path) -> Path:
    """Give a sealed checkpoint its name, in the place of an older one of the same step, and return where it is."""
    output_dir = staged.parent.parent
    checkpoint = output_dir / staged.name
    _move_to_trash(checkpoint)
    staged.rename(checkpoint)
    with suppress(OSError):  # It holds others that were sealed.
        staged.parent.rmdir()
    _fsync(output_dir)
    clear_trash(output_dir)
    return checkpoint


def clear_leftovers(output_dir: Path) -> None:
    """Remove what a process that died left half-written or half-deleted; what was already sealed gets its name."""
    for staged in list((output_dir / STAGING).glob("checkpoint-*")):
        if is_complete(staged):
            publish(staged)
    for name in (STAGING, REHEARSAL, _TRASH):
        shutil.rmtree(output_dir / name, ignore_errors=True)


def find_last_complete(output_dir: Path) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint of a run and the newer ones that were skipped because they are not.

    Source: replaces transformers ``get_last_checkpoint``, which takes half-written folders;
    see ``tests/training/test_checkpoints.py``.
    """
    skipped: list[Path] = []
    for _, path in list_checkpoints(output_dir):
        if is_complete(path):
            return path, skipped
        skipped.append(path)
    return None, skipped


def find_last_whole(output_dir: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint every byte of which is as it was written; put newer ones that are not aside.

    What is put aside counts for nothing any more, and is deleted by nobody but the user. One process alone may call.

    Args:
        output_dir: Of the run.
        say: Tells of each checkpoint that is put aside, with the file that is wrong.
    """
    for _, path in list_checkpoints(output_dir):
        damage = find_damage(path)
        if damage is None:
            return path
        aside = _put_aside(path, "damaged")
        say(f"{path.name} is not whole: {damage}; it is kept as {aside.name}, and the one before it is used")
    return None


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, complete or not, the newest first."""
    numbered = [
        (int(match[1]), path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(numbered, reverse=True)


def rotate(output_dir: Path, keep_last: int | None, keep_steps: Collection[int], keep_every: int | None = None) -> None:
    """Delete all but the newest complete checkpoints; call it when the newest one is sealed, never before.

    What is not complete is neither counted nor deleted: it may be all that is left of something.

    Args:
        output_dir: Where the checkpoints are.
        keep_last: Complete checkpoints to keep; ``None`` keeps all.
        keep_steps: Steps whose checkpoints stay besides.
        keep_every: The checkpoints of every so many steps stay besides.
    """
    if keep_last is None:
        return
    complete = [(step, path) for step, path in list_checkpoints(output_dir) if is_complete(path)]
    for step, path in complete[keep_last:]:
        if step not in keep_steps and not (keep_every and step % keep_every == 0):
            _move_to_trash(path)
    clear_trash(output_dir)


def supersede(output_dir: Path, after_step: int) -> None:
    """Put the checkpoints after a step aside, under a name that is never resumed: the run goes on differently there."""
    for step, path in list_checkpoints(output_dir):
        if step > after_step:
            _put_aside(path, "superseded")


def clear_trash(output_dir: Path) -> None:
    """Delete what was moved out of the way."""
    shutil.rmtree(output_dir / _TRASH, ignore_errors=True)


def _find_damage(checkpoint: Path, *, reads: bool) -> str | None:
    record = read_complete(checkpoint)
    if record is None:
        return f"it has no readable {COMPLETE}"
    for name, expected in record["files"].items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                return f"{name} has {size:,} bytes and not {expected['size']:,}"
            if reads and _hash(path) != expected["sha256"]:
                return f"{name} holds other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _move_to_trash(path: Path) -> None:
    """Take a folder out of the way at once: what is left when a deletion is interrupted must not pass for whole."""
    trash = path.parent / _TRASH
    if path.exists():
        trash.mkdir(exist_ok=True)
        shutil.rmtree(trash / path.name, ignore_errors=True)
        path.rename(trash / path.name)


def _put_aside(path: Path, why: str) -> Path:
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

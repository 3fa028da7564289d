"""Which checkpoints may be resumed: those whose last written file says that all the others are whole. Which stay."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

COMPLETE = "COMPLETE.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_complete(checkpoint: Path, *, step: int, world_size: int) -> None:
    """Seal a checkpoint: flush its files to disk, then write ``COMPLETE.json`` with their sizes in bytes, last.

    Args:
        checkpoint: Folder with every file of the checkpoint in place.
        step: Optimizer step it was taken after.
        world_size: Number of processes that wrote it.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE)
    for path in files:
        _fsync(path)
    record = {
        "step": step,
        "world_size": world_size,
        "files": {str(path.relative_to(checkpoint)): path.stat().st_size for path in files},
    }
    partial = checkpoint / f"{COMPLETE}.partial"
    partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
    _fsync(partial)
    partial.rename(checkpoint / COMPLETE)
    _fsync(checkpoint)


def is_complete(checkpoint: Path) -> bool:
    """Return whether ``COMPLETE.json`` is there and every file it lists has the size it had."""
    try:
        files = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


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


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, complete or not, the newest first."""
    numbered = [
        (int(match[1]), path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(numbered, reverse=True)


def rotate(output_dir: Path, keep_last: int | None, keep_steps: Collection[int]) -> None:
    """Delete all but the newest complete checkpoints; call it when the newest one is sealed, never before.

    What is not complete goes too, unless it is newer than every complete one.

    Args:
        output_dir: Where the checkpoints are.
        keep_last: Complete checkpoints to keep; ``None`` keeps all.
        keep_steps: Steps whose checkpoints stay besides.
    """
    if keep_last is None:
        return
    num_kept = 0
    for step, path in list_checkpoints(output_dir):
        if is_complete(path):
            num_kept += 1
            is_old = num_kept > keep_last
        else:
            is_old = num_kept > 0
        if is_old and step not in keep_steps:
            # Its seal first: what is left when the deletion is interrupted must not pass for a whole checkpoint.
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def supersede(output_dir: Path, after_step: int) -> None:
    """Put the checkpoints after a step aside, under a name that is never resumed: the run goes on differently there."""
    for step, path in list_checkpoints(output_dir):
        if step > after_step:
            aside = path.with_name(f"superseded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

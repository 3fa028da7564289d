"""Read and write JSON Lines files, such as datasets and metrics of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Any], *, ensure_ascii: bool = False) -> Path:
    """Write one row per line and return the path; lone surrogates require ``ensure_ascii``."""
    path.write_text("".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_events(output_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the events of one kind from a run's ``metrics.jsonl``."""
    return [event for event in read_rows(output_dir / "metrics.jsonl") if event["kind"] == kind]

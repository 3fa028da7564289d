"""Read and write rows: JSON Lines files, such as datasets and metrics of runs, and rows of a dataset's source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes_lib.config.schema import DatasetFormat
    from recipes_lib.data.sources.rows import Row, Source


def write_rows(path: Path, rows: Iterable[Any], *, ensure_ascii: bool = False) -> Path:
    """Write one row per line and return the path; lone surrogates require ``ensure_ascii``."""
    path.write_text("".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_source(source: Source, declared: DatasetFormat = "auto") -> Iterator[Row]:
    """Return the valid rows of a source in canonical form, as of a mixture of one part."""
    from recipes_lib.data.sources.mixtures import Mixture, Part

    return Mixture(parts=[Part(source=source, format=declared)]).rows()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_events(output_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the events of one kind from a run's ``metrics.jsonl``."""
    return [event for event in read_rows(output_dir / "metrics.jsonl") if event["kind"] == kind]

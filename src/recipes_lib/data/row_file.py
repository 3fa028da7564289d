"""Append-only file of generated rows with a progress record, so that generation can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import read_record, replace_record


class Counts(Protocol):
    """A dataclass of numbers that are counted on.

    Attributes:
        num_bytes: Of the file, as of the other numbers.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    num_bytes: int


Counted = TypeVar("Counted", bound=Counts)


class RowFile(Generic[Counted]):
    """Rows, JSON Lines, and beside them ``NAME.record.json``.

    A process that is killed leaves whole batches, and the next one resumes after them.

    Attributes:
        counts: How far the rows are.
    """

    def __init__(
        self, path: Path, key: str, counts: Counted, *, what: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Open a file of rows, new or begun.

        Args:
            path: Of the rows.
            key: Of everything that decides them.
            counts: Of no row.
            what: Says of rows with another key what they are of, behind ``holds``.
            facts: JSON values for the record.

        Raises:
            ConfigError: There is a file that was not written so, or of other rows.
            DataError: Its record cannot be read.
        """
        self._path, self._key, self._facts = path, key, dict(facts or {})
        self._record = path.with_name(f"{path.name}.record.json")
        self.counts = counts
        if self._record.exists():
            fields = {"key": str, **{name: type(value) | int for name, value in asdict(counts).items()}}
            record = read_record(self._record, fields, remedy=f"delete it and {path} to begin anew")
            if record["key"] != key:
                raise ConfigError(
                    Problem(str(path), f"holds {what}", "name another --output, or delete it and its record")
                )
            self.counts = replace(counts, **{name: record[name] for name in asdict(counts)})
        elif path.exists():
            raise ConfigError(Problem(str(path), "is there, and not by this command", "name another --output"))

    def write(self, batches: Iterator[Sequence[Mapping[str, Any]]]) -> None:
        """Append batches of rows; each is on disk before it is counted there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            # What a killed process wrote and did not count is written again.
            file.truncate(self.counts.num_bytes)
            for rows in batches:
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                self.counts.num_bytes += file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
                replace_record(self._record, {"key": self._key, **self._facts, **asdict(self.counts)})

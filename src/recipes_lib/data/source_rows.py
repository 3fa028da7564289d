"""What a source of rows is, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from recipes_lib.data.rows import Row
from recipes_lib.errors import Problem


@dataclass(slots=True)
class RawRow:
    """A row as the dataset has it, and its place.

    Attributes:
        source: File or Hub id, as the user would write it.
        index: 1-based line for line-based files, 0-based row otherwise.
        index_name: ``line`` or ``row``.
        columns: The values by column.
    """

    source: str
    index: int
    index_name: str
    columns: dict[str, Any]

    @property
    def where(self) -> str:
        """The row as an error names it."""
        return Row(source=self.source, index=self.index, index_name=self.index_name).where


Entry = RawRow | Problem
"""A row, or the problem that stands in its place; so one pass over a file finds every broken line."""


class Source(Protocol):
    """Rows that can be read again and again, in the same order, in memory that does not grow with their number."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def streaming(self) -> bool:
        """Whether reading it through just to list every problem is too much to ask."""

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: At the end: what cannot be read further, so that nobody knows how many rows are lost.
        """

    def fingerprint(self) -> str:
        """SHA-256 of what the rows are made of, without parsing them."""

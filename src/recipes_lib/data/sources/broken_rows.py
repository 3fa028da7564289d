"""Broken rows of a dataset: raised together, or dropped and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from recipes_lib.config.schema import TokensConfig
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError, Problem, merge_alike, raise_problems

_MIN_ROWS: Final = 500
"""Of a stream the share that is broken is judged from so many rows on, its end aside."""

Item = TypeVar("Item")
Chunk = TypeVar("Chunk")


class BrokenRows:
    """Counts the rows of a source or mixture and collects their problems, according to ``broken_rows``.

    Attributes:
        are_dropped: Whether broken rows are left out, up to a share; otherwise each is an error.
        num_rows: Rows read, the broken ones among them.
        num_broken: Those that cannot be read, rendered or tokenised.
        refused: What is an error whatever is dropped: files that break off, rows that are too long.
    """

    def __init__(
        self, tokens: TokensConfig | None = None, *, is_stream: bool = False, num_rows: int = 0, num_broken: int = 0
    ) -> None:
        """Start from the counts of an earlier process, or from 0.

        Args:
            tokens: Options; without them broken rows are an error.
            is_stream: Whether reading all rows just to tell all problems is too much to ask.
            num_rows: Rows read before.
            num_broken: Those of them that are broken.
        """
        options = tokens or TokensConfig()
        self._is_stream = is_stream
        self.are_dropped = options.broken_rows == "drop"
        self._max_fraction = options.max_broken_fraction if self.are_dropped else 0.0
        self.num_rows, self.num_broken = num_rows, num_broken
        self.refused: list[Problem] = []
        self._problems: list[Problem] = []

    def add(self, num_rows: int, problems: Sequence[Problem]) -> None:
        """Count read rows and their problems; every problem names its row."""
        self.num_rows += num_rows
        # Rows, not problems, of which one row can have several.
        self.num_broken += len({problem.where for problem in problems})
        self._problems += problems

    def take(self, entries: Iterable[Item | Problem]) -> Iterator[Item]:
        """Yield the valid entries; after the first broken one none, unless broken ones are dropped. Raises nothing."""
        try:
            for entry in entries:
                self.add(1, [entry] if isinstance(entry, Problem) else [])
                if not isinstance(entry, Problem) and (self.are_dropped or not self._problems):
                    yield entry
                if self.are_hopeless:
                    break
        except DataError as error:
            self.refused += error.problems

    def skim(self, entries: Iterable[Row | Problem]) -> Iterator[Row | Problem]:
        """Yield the entries; if broken rows are an error, entries after the first are only counted, not encoded."""
        is_in_vain = False
        for entry in entries:
            is_in_vain = is_in_vain or (isinstance(entry, Problem) and not self.are_dropped)
            if is_in_vain and isinstance(entry, Row):
                self.num_rows += 1
            else:
                yield entry

    @property
    def are_hopeless(self) -> bool:
        """Whether more rows of a stream are broken than allowed, so that reading stops."""
        return self._is_stream and self.num_broken > self._max_fraction * max(self.num_rows, _MIN_ROWS)

    def judge(self, name: str) -> list[Problem]:
        """Return the error to raise after all rows are read, if any.

        Args:
            name: What the user called the rows.
        """
        are_too_many = self.num_broken > self._max_fraction * self.num_rows
        problems = merge_alike(self._problems, self.num_rows) if are_too_many else []
        if problems and self.are_dropped:
            found = f"{self.describe()} are broken, and max_broken_fraction is {self._max_fraction:g}"
            problems.insert(0, Problem(name, found, "fix them, or raise it"))
        return [*self.refused, *problems]

    def read(self, entries: Iterable[Item | Problem], name: str) -> Iterator[Item]:
        """Yield the valid entries, as ``take``, and raise the error at the end.

        Raises:
            DataError: More rows are broken than may be, or what they are read from is.
        """
        yield from self.take(entries)
        raise_problems(self.judge(name), name)

    def describe(self) -> str:
        """Return the number of broken rows, of how many."""
        share = self.num_broken / max(1, self.num_rows)
        return f"{self.num_broken:,} of {self.num_rows:,} rows ({share:.2%})"

    def tell(self, split: str) -> list[str]:
        """Return a warning about dropped rows with their number and the first of them; empty without any.

        Args:
            split: ``train`` or ``eval``, or what the user called the rows.
        """
        if not self.num_broken:
            return []
        first = f"; the first is {self._problems[0].where}: {self._problems[0].found}" if self._problems else ""
        return [f"{split}: {self.describe()} are broken and left out{first}"]

    def count(self) -> dict[str, int]:
        """The counts as JSON values."""
        return {"num_rows": self.num_rows, "num_broken": self.num_broken}


def encode_sound(
    encode: Callable[[Sequence[Row], Sequence[int]], Chunk], entries: Sequence[Row | Problem], first: int, *, drop: bool
) -> tuple[Chunk | None, list[Problem]]:
    """Encode the rows of a chunk that can be encoded; collect the problems of the others.

    Args:
        encode: Takes rows and their numbers, and raises ``DataError`` if any of them cannot be encoded.
        entries: Rows, and the problems that stand in the place of some.
        first: Number of the first.
        drop: Whether rows that can be encoded are, though others cannot; if not, the chunk is ``None`` then.
    """
    problems = {number: entry for number, entry in enumerate(entries, first) if isinstance(entry, Problem)}
    rows = {number: entry for number, entry in enumerate(entries, first) if isinstance(entry, Row)}
    try:
        return encode(list(rows.values()), list(rows)), list(problems.values())
    except DataError as error:
        if not drop:
            return None, [*problems.values(), *error.problems]
    # To find the broken rows, each is encoded separately; few chunks have any.
    for number, row in list(rows.items()):
        try:
            encode([row], [number])
        except DataError as error:
            problems[number] = error.problems[0]
            del rows[number]
    return encode(list(rows.values()), list(rows)), [problems[number] for number in sorted(problems)]

"""Rows that a run leaves out of its order; every later row moves up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSkips:
    """The rows of a run's natural order that are never trained on.

    The natural order numbers the rows of all passes over the data one after the other, from 0. The rows of the run are
    those that are left, numbered from 0 again.

    Attributes:
        ranges: Natural numbers ``(first, stop)``, ascending, apart from each other.

    Source: ``tests/data/test_row_skips.py``.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def locate(self, rows: npt.ArrayLike) -> IntArray:
        """Return the natural numbers of rows of the run, ``int64`` of their shape.

        Args:
            rows: Numbers of rows of the run, ``int`` of any shape.
        """
        numbers = np.asarray(rows, np.int64)
        if not self.ranges:
            return numbers
        starts, stops = np.array(self.ranges, np.int64).T
        skipped = np.cumsum(stops - starts)
        # The first row of the run behind each range.
        behind = starts - (skipped - (stops - starts))
        located: IntArray = numbers + np.append(0, skipped)[np.searchsorted(behind, numbers, side="right")]
        return located

    def leave_out(self, first: int, stop: int) -> RowSkips:
        """Return the skips with these rows of the run, ``first`` to ``stop - 1``, left out as well."""
        start, last = self.locate([first, stop - 1]).tolist()
        return RowSkips(tuple(_merge([*self.ranges, (start, last + 1)])))


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged

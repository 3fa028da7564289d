"""Map-style datasets over token shards, for pretraining and its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch.utils.data

from recipes_lib.data.tokens.order import RowOrder, RowSkips
from recipes_lib.data.tokens.shards import TokenSource

IntArray = npt.NDArray[np.int64]

NO_SOURCE = -1
"""Source of a row that only holds a place."""


class TokenRow(TypedDict):
    """A row of a batch as ``PackedCollator`` takes it.

    Attributes:
        input_ids: ``uint32 (T,)``.
        loss_mask: ``bool (T,)``, True throughout.
        seq_lengths: ``int64``; lengths of what attends only to itself; they sum to T.
        source: Number of the source.
        row_ids: ``int64 (1,)``: the row's number in the order of the run; ``(0,)`` where it only holds a place.
    """

    input_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    seq_lengths: IntArray
    source: int
    row_ids: IntArray


class TokenDataset(torch.utils.data.Dataset[TokenRow]):
    """The rows of a run in the order in which they are trained on, so many for each optimizer step.

    Row r of the run is ``order.locate(r)``, whatever the step or the process that asks for it. A step with fewer rows
    than ``rows_per_step``, while the batch grows, begins with rows of no token that hold the places of whole
    micro-steps, on all processes alike. Of the order, ``skips`` leaves rows out.

    Args:
        sources: The sources, in the order of ``order``.
        order: Which window is at each row.
        max_length: Tokens of a row.
        row_starts: Rows before each step, and in all: ``int64 (num_steps + 1,)``.
        rows_per_step: Items of a step: over all processes and accumulated micro-batches.
        rows_per_micro_step: Rows of one micro-batch over all processes; divides the rows of every step.
        isolated: Whether documents in a row are kept apart.

    Source: ``tests/data/tokens/test_dataset.py``.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        order: RowOrder,
        *,
        max_length: int,
        row_starts: IntArray,
        rows_per_step: int,
        rows_per_micro_step: int,
        isolated: bool,
    ) -> None:
        rows = np.diff(row_starts)
        assert not rows_per_step % rows_per_micro_step, "a step is whole micro-steps"
        # Otherwise a process without rows would wait for ever for the gradients of another.
        assert not (rows % rows_per_micro_step).any(), "the rows of a step fill whole micro-steps"
        assert ((rows > 0) & (rows <= rows_per_step)).all(), "a step has rows, and no more than fit"
        self._sources = sources
        self._order = order
        self._max_length = max_length
        self._row_starts = row_starts
        self._rows_per_step = rows_per_step
        self._isolated = isolated
        self.skips = RowSkips()

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the first row of step ``step``, from 0, and the first behind it."""
        return int(self._row_starts[step]), int(self._row_starts[step + 1])

    def __len__(self) -> int:
        return (len(self._row_starts) - 1) * self._rows_per_step

    def __getitem__(self, index: int) -> TokenRow:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[TokenRow]:
        """The rows of a micro-batch; what a data loader calls."""
        steps, items = np.divmod(np.asarray(indices, np.int64), self._rows_per_step)
        ends = self._row_starts[steps + 1]
        rows = ends - self._rows_per_step + items
        is_real = rows >= self._row_starts[steps]
        numbers = self.skips.locate(np.where(is_real, rows, 0))
        places = self._order.locate(numbers)
        located = zip(is_real.tolist(), places.source.tolist(), places.window.tolist(), numbers.tolist(), strict=True)
        return [self._read(*place) if real else _build_placeholder() for real, *place in located]

    def _read(self, source: int, window: int, number: int) -> TokenRow:
        start = window * self._max_length
        return _read_row(self._sources[source], source, start, start + self._max_length, self._isolated, number)


class EvalWindows(torch.utils.data.Dataset[TokenRow]):
    """All tokens of a held-out source, each in one row, in their order; the last row may be shorter.

    Args:
        source: The held-out source.
        max_length: Tokens of a row.
        isolated: Whether documents in a row are kept apart.
    """

    def __init__(self, source: TokenSource, *, max_length: int, isolated: bool) -> None:
        self._source = source
        self._max_length = max_length
        self._isolated = isolated

    def __len__(self) -> int:
        return -(-self._source.num_tokens // self._max_length)

    def __getitem__(self, index: int) -> TokenRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._max_length
        stop = min(start + self._max_length, self._source.num_tokens)
        return _read_row(self._source, 0, start, stop, self._isolated, index)


def _read_row(source: TokenSource, number: int, start: int, stop: int, isolated: bool, row: int) -> TokenRow:
    return {
        "input_ids": source.read(start, stop),
        "loss_mask": np.ones(stop - start, np.bool_),
        "seq_lengths": source.read_document_lengths(start, stop) if isolated else np.array([stop - start]),
        "source": number,
        "row_ids": np.array([row]),
    }


def _build_placeholder() -> TokenRow:
    return {
        "input_ids": np.zeros(0, np.uint32),
        "loss_mask": np.zeros(0, np.bool_),
        "seq_lengths": np.zeros(0, np.int64),
        "source": NO_SOURCE,
        "row_ids": np.zeros(0, np.int64),
    }

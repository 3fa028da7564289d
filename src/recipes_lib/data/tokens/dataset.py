"""Map-style pretraining datasets over token shards, and their row order, a pure function of seed and row number."""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch.utils.data

from recipes_lib.data.tokens.shards import IntArray, TokenSource

WordArray = npt.NDArray[np.uint64]

MAX_PERIOD: Final = 1_000_000
"""Maximum period of the pattern of sources with exact weights; others are rounded, to about its inverse."""

_NUM_ROUNDS: Final = 7
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # Constants of splitmix64.
_SHIFT: Final = np.uint64(31)


class RowPlaces(NamedTuple):
    """Positions of K rows in the sources, ``int64 (K,)`` each.

    Attributes:
        source: Index of the source.
        window: Index of the window, the ``max_length`` tokens of the row, in that source.
    """

    source: IntArray
    window: IntArray


class RowOrder:
    """Order of the windows of several weighted sources.

    In every prefix of n rows of a phase, the number of rows of each source differs from n times its weight by less than
    one. Within a source, every window is used once before any is repeated, in a new order in each pass.

    Args:
        num_windows: Number of windows of each source, at least 1 if it has a weight.
        phases: ``(first row, weight of each source)`` of each phase of the curriculum, ascending, the first at row 0;
            of two with the same first row, the first has no rows. Weights need not sum to 1; a source of weight 0 has
            no rows.
        seed: Seed of the order within the sources.

    Source: Tijdeman, "The chairman assignment problem" (1980); ``tests/data/tokens/test_order.py``.
    """

    def __init__(self, num_windows: Sequence[int], phases: Sequence[tuple[int, Sequence[float]]], *, seed: int) -> None:
        self._num_windows = np.array(num_windows, np.int64)
        self._seed = seed
        self._first_rows = np.array([first_row for first_row, _ in phases], np.int64)
        self._patterns = [_build_pattern(_round_weights(weights)) for _, weights in phases]
        # Rows of each source before each phase; the last one has no end.
        counts = [np.zeros(len(num_windows), np.int64)]
        for pattern, num_rows in zip(self._patterns, np.diff(self._first_rows).tolist(), strict=False):
            counts.append(counts[-1] + pattern.count(num_rows))
        self._counts = np.stack(counts)

    @property
    def weights(self) -> list[list[float]]:
        """Weights of the sources in each phase, which sum to 1; rounded if they need a period over ``MAX_PERIOD``."""
        return [(pattern.units / pattern.units.sum()).tolist() for pattern in self._patterns]

    def locate(self, rows: IntArray) -> RowPlaces:
        """Return the positions of rows in the sources.

        Args:
            rows: Row numbers from 0, ``int64 (K,)``.
        """
        source, drawn = np.empty_like(rows), np.empty_like(rows)
        phases = np.searchsorted(self._first_rows, rows, side="right") - 1
        for phase in np.unique(phases).tolist():
            chosen = phases == phase
            pattern = self._patterns[phase]
            period, at = np.divmod(rows[chosen] - self._first_rows[phase], len(pattern.sources))
            found = pattern.sources[at].astype(np.int64)
            source[chosen] = found
            # Rows of the same source before each row: in earlier phases, in earlier periods, and in this period.
            drawn[chosen] = self._counts[phase][found] + period * pattern.units[found] + pattern.ranks[at]
        epoch, position = np.divmod(drawn, self._num_windows[source])
        return RowPlaces(source, self._permute(source, epoch, position))

    def count_rows(self, row: int) -> IntArray:
        """Return the number of rows of each source before ``row``, ``int64 (sources,)``."""
        phase = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        counts: IntArray = self._counts[phase] + self._patterns[phase].count(row - int(self._first_rows[phase]))
        return counts

    def count_epochs(self, num_rows: int) -> npt.NDArray[np.float64]:
        """Return the number of epochs of each source in the first ``num_rows`` rows, ``float64 (sources,)``."""
        epochs: npt.NDArray[np.float64] = self.count_rows(num_rows) / np.maximum(self._num_windows, 1)
        return epochs

    def _permute(self, source: IntArray, epoch: IntArray, position: IntArray) -> IntArray:
        window = np.empty_like(position)
        # Each pair (epoch, source) as one integer: `np.unique` is slow for pairs.
        passes = epoch * len(self._num_windows) + source
        for each in np.unique(passes).tolist():
            passed, number = divmod(each, len(self._num_windows))
            chosen = passes == each
            size = int(self._num_windows[number])
            window[chosen] = permute(position[chosen], size, _derive_keys(self._seed, number, passed))
        return window


def permute(positions: IntArray, size: int, keys: WordArray) -> IntArray:
    """Apply a keyed pseudo-random permutation of ``range(size)`` to some of its elements, without a table.

    A Feistel network is a permutation of ``range(4**h)`` for any round function. Values outside of ``range(size)`` are
    mapped again until they are inside (cycle walking).

    Args:
        positions: Elements to map, ``int64 (K,)``.
        size: Number of elements of the permutation.
        keys: A key for each round, ``uint64 (rounds,)``.

    Returns:
        The permuted elements, ``int64 (K,)``.

    Source: Luby and Rackoff (1988) for the network, Black and Rogaway (2002) for cycle walking;
    ``tests/data/tokens/test_order.py``.
    """
    # The smallest power of 4 that is at least `size` is less than 4 * size, so that a value is inside after fewer than
    # four applications on average.
    half_bits = np.uint64(((size - 1).bit_length() + 1) // 2)
    values = _encrypt(positions.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _encrypt(values[outside], half_bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _encrypt(values: WordArray, half_bits: np.uint64, keys: WordArray) -> WordArray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        mixed = right + key
        for factor in _MIX:
            mixed = (mixed ^ (mixed >> _SHIFT)) * factor
        left, right = right, left ^ ((mixed ^ (mixed >> _SHIFT)) & mask)
    encrypted: WordArray = (left << half_bits) | right
    return encrypted


@functools.lru_cache(maxsize=1024)
def _derive_keys(seed: int, source: int, epoch: int) -> WordArray:
    content = f"{seed} {source} {epoch}".encode()
    digest = hashlib.blake2b(content, digest_size=8 * _NUM_ROUNDS, person=b"row order").digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Periodic pattern of the sources of consecutive rows.

    Attributes:
        units: Number of rows of each source in one period, ``int64 (sources,)``.
        sources: Source of each row of a period, ``uint16 (period,)``.
        ranks: Number of rows of the same source before each row within the period, ``uint32 (period,)``.
    """

    units: IntArray
    sources: npt.NDArray[np.uint16]
    ranks: npt.NDArray[np.uint32]

    def count(self, num_rows: int) -> IntArray:
        """Return the number of rows of each source among the first ``num_rows``, ``int64 (sources,)``."""
        periods, rest = divmod(num_rows, len(self.sources))
        return periods * self.units + np.bincount(self.sources[:rest], minlength=len(self.units))


def _round_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the rows of each source in one period: exact up to ``MAX_PERIOD`` rows, otherwise rounded."""
    # From the decimal text, so that 0.1 is one tenth instead of the nearest double.
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    # At least one row for every source of positive weight. The period is their sum, near ``MAX_PERIOD``.
    return tuple(max(1, round(share * MAX_PERIOD)) if share else 0 for share in shares)


@functools.lru_cache(maxsize=8)
def _build_pattern(units: tuple[int, ...]) -> _Pattern:
    """Build one period of Tijdeman's assignment.

    With k sources and d = 1 / (2k - 2), row j of a source of weight w, counted from 0, may be placed at row n from
    (n + 1) w - j >= d on, and must be placed before (n + 1) w - j exceeds 1 - d. Among the rows that may be placed, the
    one with the earliest deadline is next. Both limits are computed in advance, in integer arithmetic.
    """
    present = [source for source, unit in enumerate(units) if unit]
    period, num_parts = sum(units), max(1, 2 * len(present) - 2)
    # Of each row, source after source: its source, and the number of rows of that source in all and before it.
    owner = np.repeat(np.arange(len(units)), units)
    num_rows, before = np.array(units)[owner], np.arange(period) - (np.cumsum(units) - units)[owner]
    divisor, scaled = num_parts * num_rows, before * period * num_parts
    release = -(-(scaled + period) // divisor)
    deadline = (scaled + period * (num_parts - 1)) // divisor
    # Earliest deadline first is optimal for unit-time jobs with integer release times, so Tijdeman's bound holds.
    by_release = np.argsort(release, kind="stable")
    # Deadline and source as one integer, which a heap compares faster than a tuple.
    jobs = (deadline * len(units) + owner)[by_release].tolist()
    num_released = np.searchsorted(release[by_release], np.arange(1, period + 1), side="right").tolist()
    waiting: list[int] = []
    order, begun = [], 0
    for released in num_released:
        for job in jobs[begun:released]:
            heapq.heappush(waiting, job)
        begun = released
        order.append(heapq.heappop(waiting) % len(units))
    assigned = np.array(order, np.uint16)
    ranks = np.empty(period, np.uint32)
    for source in present:
        ranks[assigned == source] = np.arange(units[source])
    return _Pattern(np.array(units, np.int64), assigned, ranks)


@dataclass(frozen=True, slots=True)
class RowSkips:
    """Rows of an order that a run skips, such as those of a rolled-back loss spike.

    The order numbers the rows of all passes over the data from 0. The rows of the run are the remaining ones,
    renumbered from 0.

    Attributes:
        ranges: Skipped rows ``(first, stop)`` of the order; ascending, disjoint and not adjacent.

    Source: ``tests/data/tokens/test_row_skips.py``.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def locate(self, rows: npt.ArrayLike) -> IntArray:
        """Return the row numbers in the order for row numbers of the run, ``int64`` of the same shape.

        Args:
            rows: Row numbers of the run, ``int`` of any shape.
        """
        numbers = np.asarray(rows, np.int64)
        if not self.ranges:
            return numbers
        starts, stops = np.array(self.ranges, np.int64).T
        skipped = np.cumsum(stops - starts)
        # First row of the run after each range.
        first_after = starts - (skipped - (stops - starts))
        located: IntArray = numbers + np.append(0, skipped)[np.searchsorted(first_after, numbers, side="right")]
        return located

    def leave_out(self, first: int, stop: int) -> RowSkips:
        """Return these skips extended by rows ``first`` to ``stop - 1`` of the run."""
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


NO_SOURCE = -1
"""Value of ``source`` in a placeholder row."""


class TokenRow(TypedDict):
    """A row for ``PackedCollator``.

    Attributes:
        input_ids: Token ids, ``uint32 (T,)``.
        loss_mask: True everywhere, ``bool (T,)``.
        seq_lengths: Lengths of the parts that attend only to themselves, which sum to T, ``int64``.
        source: Index of the source; ``NO_SOURCE`` for a placeholder.
        row_ids: Row number in the order, ``int64 (1,)``; of a placeholder ``(0,)``.
    """

    input_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    seq_lengths: IntArray
    source: int
    row_ids: IntArray


@dataclass(eq=False)
class TokenDataset(torch.utils.data.Dataset[TokenRow]):
    """Rows of a run in training order, with a fixed number of items per optimizer step.

    Row r of the run is ``order.locate(r)``, for any step and process. During a batch size warm-up, a step with fewer
    rows than ``rows_per_step`` starts with placeholder rows, which fill whole micro-batches on all processes.

    Attributes:
        sources: The sources, in the order of ``order``.
        order: Order of the windows.
        max_length: Number of tokens of a row.
        row_starts: Number of rows before each step, and in total, ``int64 (num_steps + 1,)``.
        rows_per_step: Items of a step, over all processes and accumulated micro-batches.
        rows_per_micro_step: Rows of a micro-batch over all processes; divides the number of rows of every step.
        isolated: Whether documents within a row attend only to themselves.
        skips: Rows of the order that the run skips.

    Source: ``tests/data/tokens/test_dataset.py``.
    """

    sources: Sequence[TokenSource]
    order: RowOrder
    _: KW_ONLY
    max_length: int
    row_starts: IntArray
    rows_per_step: int
    rows_per_micro_step: int
    isolated: bool
    skips: RowSkips = RowSkips()

    def __post_init__(self) -> None:
        rows = np.diff(self.row_starts)
        assert not self.rows_per_step % self.rows_per_micro_step, "a step is whole micro-steps"
        # Otherwise a process without rows would not join the gradient reduction, and block the others.
        assert not (rows % self.rows_per_micro_step).any(), "the rows of a step fill whole micro-steps"
        assert ((rows > 0) & (rows <= self.rows_per_step)).all(), "a step has rows, and no more than fit"

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the first row of the 0-based step ``step``, and the first row after the step."""
        return int(self.row_starts[step]), int(self.row_starts[step + 1])

    def __len__(self) -> int:
        return (len(self.row_starts) - 1) * self.rows_per_step

    def __getitem__(self, index: int) -> TokenRow:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[TokenRow]:
        """Return the rows of a micro-batch; PyTorch's data loader prefers it to ``__getitem__``."""
        steps, items = np.divmod(np.asarray(indices, np.int64), self.rows_per_step)
        ends = self.row_starts[steps + 1]
        # Counted back from the end of the step, so that a step with fewer rows starts with the placeholders.
        rows = ends - self.rows_per_step + items
        is_real = rows >= self.row_starts[steps]
        # Placeholders are located as row 0, and not read.
        numbers = self.skips.locate(np.where(is_real, rows, 0))
        places = self.order.locate(numbers)
        located = zip(is_real.tolist(), places.source.tolist(), places.window.tolist(), numbers.tolist(), strict=True)
        return [self._read(*place) if real else _build_placeholder() for real, *place in located]

    def _read(self, source: int, window: int, number: int) -> TokenRow:
        start = window * self.max_length
        return _read_row(self.sources[source], source, start, start + self.max_length, self.isolated, number)


@dataclass(eq=False)
class EvalWindows(torch.utils.data.Dataset[TokenRow]):
    """All tokens of a held-out source in order, without overlap; the last row may be shorter.

    Attributes:
        source: The held-out source.
        max_length: Number of tokens of a row.
        isolated: Whether documents within a row attend only to themselves.
    """

    source: TokenSource
    _: KW_ONLY
    max_length: int
    isolated: bool

    def __len__(self) -> int:
        return -(-self.source.num_tokens // self.max_length)

    def __getitem__(self, index: int) -> TokenRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.max_length
        stop = min(start + self.max_length, self.source.num_tokens)
        return _read_row(self.source, 0, start, stop, self.isolated, index)


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

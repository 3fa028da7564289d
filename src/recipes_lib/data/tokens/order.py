"""Data order of pretraining: the window of each row as a pure function of seed and row number."""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
WordArray = npt.NDArray[np.uint64]

MAX_PERIOD: Final = 1_000_000
"""Longest pattern of sources; weights that need a longer one are rounded to multiples of its inverse."""

_NUM_ROUNDS: Final = 7
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64
_SHIFT: Final = np.uint64(31)


class RowPlaces(NamedTuple):
    """Where rows are read, three ``int64`` arrays of the rows' shape.

    Attributes:
        source: Number of the source.
        epoch: Passes over that source that are complete before the row.
        window: Number of the window in that source.
    """

    source: IntArray
    epoch: IntArray
    window: IntArray


class RowOrder:
    """The order in which the windows of several sources are trained on.

    At every prefix of n rows of a phase, the rows of each source differ from n times its weight by less than one.
    Inside a source all windows come once before any comes again, every pass in another order.

    Args:
        num_windows: Windows of each source.
        phases: ``(first row, weight of each source)`` of each phase, the first at row 0, rising; weights need not sum
            to 1, and a source with weight 0 is left out.
        seed: Decides the order inside the sources.

    Source: Tijdeman, "The chairman assignment problem" (1980); ``tests/data/tokens/test_order.py``.
    """

    def __init__(self, num_windows: Sequence[int], phases: Sequence[tuple[int, Sequence[float]]], *, seed: int) -> None:
        self._num_windows = np.array(num_windows, np.int64)
        self._seed = seed
        self._first_rows = np.array([first_row for first_row, _ in phases], np.int64)
        assert self._first_rows[0] == 0, "the first phase starts at 0"
        assert (np.diff(self._first_rows) > 0).all(), "phases rise"
        self._patterns: list[_Pattern] = []
        counts = [np.zeros(len(num_windows), np.int64)]
        for number, (first_row, weights) in enumerate(phases):
            units = _round_weights(weights)
            assert all(windows > 0 or not unit for windows, unit in zip(num_windows, units, strict=True))
            self._patterns.append(_build_pattern(units))
            if number + 1 < len(phases):
                num_rows = phases[number + 1][0] - first_row
                counts.append(counts[-1] + self._patterns[-1].count(num_rows))
        self._counts = np.stack(counts)

    @property
    def weights(self) -> list[list[float]]:
        """The weights that each phase keeps to, which sum to 1; rounded where the exact ones need a longer pattern."""
        return [(pattern.units / pattern.units.sum()).tolist() for pattern in self._patterns]

    def locate(self, rows: npt.ArrayLike) -> RowPlaces:
        """Where rows are read.

        Args:
            rows: Numbers of rows from 0, ``int`` of any shape.
        """
        numbers = np.asarray(rows, np.int64)
        flat = numbers.reshape(-1)
        source, drawn = np.empty_like(flat), np.empty_like(flat)
        phases = np.searchsorted(self._first_rows, flat, side="right") - 1
        for phase in np.unique(phases).tolist():
            chosen = phases == phase
            pattern = self._patterns[phase]
            period, at = np.divmod(flat[chosen] - self._first_rows[phase], len(pattern.sources))
            found = pattern.sources[at].astype(np.int64)
            source[chosen] = found
            drawn[chosen] = self._counts[phase][found] + period * pattern.units[found] + pattern.ranks[at]
        epoch, position = np.divmod(drawn, self._num_windows[source])
        window = self._permute(source, epoch, position)
        return RowPlaces(*(values.reshape(numbers.shape) for values in (source, epoch, window)))

    def count_rows(self, row: int) -> IntArray:
        """Rows of each source before ``row``, ``int64 (sources,)``."""
        phase = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        counts: IntArray = self._counts[phase] + self._patterns[phase].count(row - int(self._first_rows[phase]))
        return counts

    def count_epochs(self, num_rows: int) -> npt.NDArray[np.float64]:
        """Passes over each source that the first ``num_rows`` rows make, fractional, ``float64 (sources,)``."""
        epochs: npt.NDArray[np.float64] = self.count_rows(num_rows) / np.maximum(self._num_windows, 1)
        return epochs

    def _permute(self, source: IntArray, epoch: IntArray, position: IntArray) -> IntArray:
        window = np.empty_like(position)
        # In one number: numpy finds distinct pairs slowly.
        passes = epoch * len(self._num_windows) + source
        for each in np.unique(passes).tolist():
            passed, number = divmod(each, len(self._num_windows))
            chosen = passes == each
            size = int(self._num_windows[number])
            window[chosen] = permute(position[chosen], size, _derive_keys(self._seed, number, passed))
        return window


def permute(positions: IntArray, size: int, keys: WordArray) -> IntArray:
    """Where a keyed pseudo-random permutation of ``range(size)`` takes some of its members; nothing is tabulated.

    A Feistel network is a permutation of ``range(4**h)``, whatever its round function; a member that it takes outside
    ``range(size)`` is taken on until it is inside.

    Args:
        positions: Members, ``int64 (K,)``.
        size: Members in all.
        keys: One word for each round, ``uint64 (rounds,)``.

    Returns:
        ``int64 (K,)``.

    Source: Luby and Rackoff (1988) for the network, Black and Rogaway (2002) for cycle walking;
    ``tests/data/tokens/test_order.py``.
    """
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
    """The sources of consecutive rows, repeated for ever.

    Attributes:
        units: Rows of each source in one period, ``int64 (sources,)``.
        sources: Source of each row of a period, ``uint16 (period,)``.
        ranks: Rows of the same source before it in the period, ``uint32 (period,)``.
    """

    units: IntArray
    sources: npt.NDArray[np.uint16]
    ranks: npt.NDArray[np.uint32]

    def count(self, num_rows: int) -> IntArray:
        """Rows of each source among the first ``num_rows``."""
        periods, rest = divmod(num_rows, len(self.sources))
        return periods * self.units + np.bincount(self.sources[:rest], minlength=len(self.units))


def _round_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of each source in one period: exact if that is at most ``MAX_PERIOD`` rows, else by largest remainder."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    assert min(exact) >= 0, "a negative weight"
    assert total, "all weights are 0"
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    # A source with any weight comes at least once.
    units = [max(1, math.floor(share * MAX_PERIOD)) if share else 0 for share in shares]
    by_remainder = sorted(range(len(units)), key=lambda at: units[at] - shares[at] * MAX_PERIOD)
    spare = MAX_PERIOD - sum(units)
    for at in by_remainder[: max(0, spare)]:
        units[at] += 1
    units[units.index(max(units))] += min(0, spare)
    return tuple(units)


@functools.lru_cache(maxsize=8)
def _build_pattern(units: tuple[int, ...]) -> _Pattern:
    """One period of Tijdeman's assignment.

    With k sources and d = 1 / (2k - 2), the row j of a source with weight w (both from 0) may come from row n on with
    (n + 1) w - j >= d, and has to come before (n + 1) w - j exceeds 1 - d. Of the rows that may come, the one that has
    to come first is next. Both limits are known beforehand, as fractions of whole numbers.
    """
    present = [source for source, unit in enumerate(units) if unit]
    period, num_parts = sum(units), max(1, 2 * len(present) - 2)
    releases, deadlines, sources = [], [], []
    for source in present:
        done = np.arange(units[source]) * period * num_parts
        divisor = num_parts * units[source]
        releases.append(-(-(done + period) // divisor))
        deadlines.append((done + period * (num_parts - 1)) // divisor)
        sources.append(np.full(units[source], source))
    release = np.concatenate(releases)
    by_release = np.argsort(release, kind="stable")
    # One number for each row, so that the heap compares plain integers.
    jobs = (np.concatenate(deadlines) * len(units) + np.concatenate(sources))[by_release].tolist()
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
    """The rows of a run's natural order that are never trained on.

    The natural order numbers the rows of all passes over the data one after the other, from 0. The rows of the run are
    those that are left, numbered from 0 again.

    Attributes:
        ranges: Natural numbers ``(first, stop)``, ascending, apart from each other.

    Source: ``tests/data/tokens/test_row_skips.py``.
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

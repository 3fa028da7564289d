"""The order of rows over weighted sources and curricula, and the permutations within a source."""

from __future__ import annotations

import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.tokens import dataset as token_order
from recipes_lib.data.tokens.dataset import RowOrder, permute

KEYS = np.random.default_rng(0).integers(0, 2**63, 7).astype(np.uint64)
PUBLISHED_SOURCES = [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
PUBLISHED_WINDOWS = [1, 1, 5, 4, 3, 2, 8, 6, 4, 7, 2, 0]
weights_lists = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


def sources_of(order: RowOrder, num_rows: int, first: int = 0) -> list[int]:
    return order.locate(np.arange(first, first + num_rows)).source.tolist()


def assert_within_a_row(sources: list[int], weights: list[float]) -> None:
    """Assert that in every prefix of n rows, the count of each source is within 1 of n times its weight."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    units = [int(weight * scale) for weight in exact]
    counts = [0] * len(weights)
    for n, source in enumerate(sources, start=1):
        counts[source] += 1
        assert all(
            abs(count * sum(units) - n * unit) < sum(units) for count, unit in zip(counts, units, strict=True)
        ), n


def assign_chairs(weights: list[int], num_rows: int) -> list[int]:
    """Return the order of Tijdeman's algorithm as published, step by step in exact fractions."""
    shares = {source: Fraction(weight, sum(weights)) for source, weight in enumerate(weights) if weight}
    slack = Fraction(1, max(1, 2 * len(shares) - 2))
    counts = dict.fromkeys(shares, 0)
    chosen: list[int] = []
    for n in range(1, num_rows + 1):
        waiting = [s for s, share in shares.items() if n * share - counts[s] >= slack]
        chosen.append(min(waiting, key=lambda s: (1 - slack - n * shares[s] + counts[s]) / shares[s] // 1))
        counts[chosen[-1]] += 1
    return chosen


@settings(max_examples=20)
@given(weights_lists)
def test_every_prefix_is_within_one_row_of_weights(weights):
    order = RowOrder([5] * len(weights), [(0, weights)], seed=0)
    assert_within_a_row(sources_of(order, 3 * sum(weights)), weights)


@settings(max_examples=20)
@given(weights_lists)
def test_source_order_equals_published_algorithm(weights):
    order = RowOrder([5] * len(weights), [(0, weights)], seed=0)
    assert sources_of(order, 2 * sum(weights)) == assign_chairs(weights, 2 * sum(weights))


def test_decimal_weights_are_exact():
    weights = [0.1, 0.2, 0.7]
    order = RowOrder([1, 1, 1], [(0, weights)], seed=0)
    assert np.bincount(sources_of(order, 10)).tolist() == [1, 2, 7]
    assert sources_of(order, 10, first=10**12) == sources_of(order, 10)
    sevenths = RowOrder([1, 1], [(0, [0.1, 0.6])], seed=0)
    assert sevenths.weights == [[1 / 7, 6 / 7]]
    assert np.bincount(sources_of(sevenths, 7, first=7 * 10**12)).tolist() == [1, 6]


def test_long_pattern_weights_are_rounded_and_logged(monkeypatch):
    monkeypatch.setattr(token_order, "MAX_PERIOD", 100)
    weights = [123457.0, 7654321.0, 22222223.0, 1.0]
    order = RowOrder([9] * 4, [(0, weights)], seed=0)
    (kept,) = order.weights
    # A source of any weight above 0 has a row.
    assert kept == pytest.approx([count / 102 for count in (1, 26, 74, 1)])
    assert_within_a_row(sources_of(order, 306), [1, 26, 74, 1])


def test_rounded_weights_fit_pattern(monkeypatch):
    monkeypatch.setattr(token_order, "MAX_PERIOD", 10)
    (kept,) = RowOrder([9] * 9, [(0, [1000.3] + [1e-3] * 8)], seed=0).weights
    assert kept == pytest.approx([10 / 18] + [1 / 18] * 8)


@settings(max_examples=40)
@given(weights_lists, st.data())
def test_curriculum_phases_keep_their_weights(weights, data):
    others = data.draw(st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)).filter(any))
    first = data.draw(st.integers(1, 60))
    order = RowOrder([7] * len(weights), [(0, weights), (first, others)], seed=1)
    assert_within_a_row(sources_of(order, first), weights)
    assert_within_a_row(sources_of(order, 50, first=first), others)


def test_curriculum_phase_shorter_than_a_row_has_no_rows():
    first, last = (0, [1, 3]), (17, [2, 1])
    whole, skipped = (RowOrder([40, 30], phases, seed=3) for phases in ([first, last], [first, (17, [1, 0]), last]))
    rows = np.arange(60)
    assert all(map(np.array_equal, skipped.locate(rows), whole.locate(rows)))
    assert [skipped.count_rows(row).tolist() for row in rows] == [whole.count_rows(row).tolist() for row in rows]


def test_curriculum_phase_continues_each_source():
    order = RowOrder([40, 30], [(0, [1, 3]), (17, [1, 0]), (29, [2, 1])], seed=3)
    places = order.locate(np.arange(100))
    for source, num_windows in enumerate([40, 30]):
        windows = places.window[places.source == source]
        first_pass = windows[:num_windows]
        assert sorted(first_pass.tolist()) == sorted(set(first_pass.tolist()))
    assert set(sources_of(order, 12, first=17)) == {0}


@settings(max_examples=40)
@given(st.integers(1, 3000))
def test_permutation_is_bijection(size):
    assert sorted(permute(np.arange(size), size, KEYS).tolist()) == list(range(size))


def test_huge_permutation_stays_in_range():
    size = 10**15 + 7
    positions = np.random.default_rng(0).integers(0, size, 1000)
    taken = permute(positions, size, KEYS)
    assert len(set(taken.tolist())) == len(set(positions.tolist()))
    assert 0 <= taken.min() < size // 100 < size - size // 100 < taken.max() < size


@pytest.mark.parametrize("size", [2, 5, 16, 100])
def test_permutation_is_uniform(size):
    num_keys = 500
    rng = np.random.default_rng(1)
    hits = np.zeros((size, size))
    for _ in range(num_keys):
        hits[np.arange(size), permute(np.arange(size), size, rng.integers(0, 2**63, 7).astype(np.uint64))] += 1
    expected = num_keys / size
    chi_square = ((hits - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_permutation_separates_neighbours():
    taken = permute(np.arange(10_000), 10_000, KEYS)
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(taken)) == 1).sum() < 20


def windows_of(seed: int, epoch: int, source: int = 0) -> list[int]:
    order = RowOrder([50, 50], [(0, [1, 1])], seed=seed)
    places = order.locate(np.arange(400))
    return places.window[places.source == source][50 * epoch : 50 * (epoch + 1)].tolist()


def test_each_pass_is_own_permutation_of_windows():
    passes = [windows_of(seed, epoch, source) for seed in (0, 1) for epoch in (0, 1) for source in (0, 1)]
    assert all(sorted(windows) == list(range(50)) for windows in passes)
    assert all(one != other for one, other in itertools.combinations(passes, 2))
    assert windows_of(0, 1) == windows_of(0, 1)


def test_row_is_equal_for_single_and_batched_lookup():
    order = RowOrder([13, 4, 9], [(0, [3, 1, 2.5]), (31, [0, 1, 1])], seed=5)
    together = order.locate(np.arange(120))
    for row in range(120):
        assert all(map(np.array_equal, order.locate(np.array([row])), (part[[row]] for part in together)))
    shuffled = np.random.default_rng(0).permutation(120)
    for part, whole in zip(order.locate(shuffled), together, strict=True):
        assert part.tolist() == whole[shuffled].tolist()
    copy = pickle.loads(pickle.dumps(order))
    assert [part.tolist() for part in copy.locate(np.arange(120))] == [part.tolist() for part in together]


def test_published_order_is_stable():
    places = RowOrder([10, 6], [(0, [0.7, 0.3])], seed=42).locate(np.arange(12))
    assert places.source.tolist() == PUBLISHED_SOURCES
    assert places.window.tolist() == PUBLISHED_WINDOWS


@settings(max_examples=40)
@given(st.integers(0, 200))
def test_count_rows_equals_direct_count(num_rows):
    order = RowOrder([13, 4, 9], [(0, [3, 1, 2.5]), (31, [0, 1, 1]), (90, [1, 1, 0])], seed=5)
    expected = np.bincount(sources_of(order, num_rows), minlength=3) if num_rows else np.zeros(3)
    assert order.count_rows(num_rows).tolist() == expected.tolist()
    assert order.count_epochs(num_rows).tolist() == pytest.approx((expected / [13, 4, 9]).tolist())

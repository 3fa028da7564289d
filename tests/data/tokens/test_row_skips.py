"""Row numbers after skipped spans, against a list of the remaining rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.tokens.dataset import RowSkips

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5)


@given(spans)
def test_skipped_rows_are_removed_from_natural_order(spans):
    rows = list(range(300))
    skips = RowSkips()
    for first, length in spans:
        natural = set(range(rows[first], rows[first + length - 1] + 1))
        rows = [row for row in rows if row not in natural]
        skips = skips.leave_out(first, first + length)
        assert skips.locate(np.arange(200)).tolist() == rows[:200]
    assert all(one[1] < other[0] for one, other in zip(skips.ranges, skips.ranges[1:], strict=False))


def test_skip_keeps_shape_and_is_identity_without_spans():
    rows = np.arange(6).reshape(2, 3)
    assert (RowSkips().locate(rows) == rows).all()
    assert RowSkips(((2, 4),)).locate(rows).tolist() == [[0, 1, 4], [5, 6, 7]]

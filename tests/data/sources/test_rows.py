"""Remarks on rows: their texts, and the bit sets that store them."""

from __future__ import annotations

import numpy as np
import pytest

from recipes_lib.data.sources.rows import Remark, build_bits, find_remarked


@pytest.mark.parametrize("remark", Remark)
def test_remark_has_predicate_and_remedy(remark: Remark) -> None:
    assert remark.found.split()[0] in ("give", "have", "say", "call", "spell", "open")
    assert bool(remark.remedy) == (remark is not Remark.CUT)


def test_find_remarked_orders_remarks_by_first_row() -> None:
    first, second, third = Remark.LOST_TOOLS, Remark.LOST_REASONING, Remark.SPECIAL_TEXT
    bits = build_bits([[], [first], [second, first], [], (second, third), [first]])
    assert {remark: rows.tolist() for remark, rows in find_remarked(bits).items()} == {
        first: [1, 2, 5],
        second: [2, 4],
        third: [4],
    }
    assert list(find_remarked(bits)) == [first, second, third]
    assert list(find_remarked(bits[2:])) == [second, first, third]
    assert find_remarked(build_bits([[], []])) == {}


def test_row_can_have_every_remark() -> None:
    bits = build_bits([list(Remark)])
    assert bits.dtype == np.uint16
    assert list(find_remarked(bits)) == list(Remark)

"""Remarks stay with their rows, and each says what was found and what to do."""

from __future__ import annotations

import numpy as np
import pytest

from recipes_lib.data.chat.remarks import Remark, Remarked, take_remarked


@pytest.mark.parametrize("remark", Remark)
def test_a_remark_goes_on_from_a_count_of_rows_and_has_a_remedy(remark: Remark) -> None:
    assert remark.found.split()[0] in ("give", "say", "call", "spell")
    assert remark.remedy


def test_the_remarked_rows_are_taken_by_their_position() -> None:
    rows = [Remarked(number, f"a:{number}", [Remark.LOST_TOOLS]) for number in (2, 5, 9)]
    assert take_remarked(rows, np.array([9, 1, 2])) == [rows[0], rows[2]]
    assert take_remarked(rows, np.array([], np.int64)) == []
    assert take_remarked([], np.array([1])) == []

"""Remarks on rows: their texts, and the bit sets that store them."""

from __future__ import annotations

import numpy as np
import pytest

from recipes_lib.data.sources.rows import Remark, Row, add_system_prompt, build_bits, find_remarked
from recipes_lib.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}
BRIEF = {"role": "system", "content": "Be brief."}


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


def test_system_prompt_moves_positions_of_messages() -> None:
    row = Row(where="a", messages=[ASKED, ANSWERED, ASKED, ANSWERED], untrained={1}, num_prompt_messages=3)
    added = add_system_prompt(row, "Be brief.")
    assert added.messages == [BRIEF, *row.messages]
    assert [added.messages[index] for index in added.untrained] == [ANSWERED]
    assert added.messages[: added.num_prompt_messages] == [BRIEF, ASKED, ANSWERED, ASKED]
    assert add_system_prompt(Row(where="a", messages=[ASKED]), "Be brief.").num_prompt_messages is None


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_keeps_its_own_system_message(role: str) -> None:
    row = Row(where="a", messages=[{"role": role, "content": "Be long."}, ASKED, ANSWERED])
    assert add_system_prompt(row, "Be brief.") is row


def test_plain_text_has_no_system_message() -> None:
    row = Row(where="a", text="Once upon a time")
    assert add_system_prompt(row, None) is row
    with pytest.raises(DataError, match="a: `system_prompt` is a message of a chat, and the row is plain text"):
        add_system_prompt(row, "Be brief.")

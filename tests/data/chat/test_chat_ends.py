"""Terminators in answers: the one at the end is accepted, any other is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.chat.spans import refuse_inner_ends
from recipes_lib.errors import DataError

ENDS = ["</s>", "<|im_end|>"]
pieces = st.lists(st.sampled_from(["a", " ", "<", *ENDS]), max_size=4).map("".join)


@given(answer=pieces, added=st.sampled_from(["", "</s>", "<|im_end|>\n"]))
def test_accepted_answer_has_one_terminator_at_its_end(answer: str, added: str) -> None:
    turn = answer + added
    try:
        refuse_inner_ends("row 1", "message 1", [answer], turn, ENDS)
    except DataError:
        assert any(end in answer for end in ENDS)
        return
    num_ends = sum(answer.count(end) for end in ENDS)
    assert not turn.rstrip().endswith(tuple(end + end for end in ENDS))
    assert num_ends == 0 or (num_ends == 1 and not added.strip() and answer.rstrip().endswith(tuple(ENDS)))


def test_terminator_error_shows_position() -> None:
    with pytest.raises(DataError) as refused:
        refuse_inner_ends("row 1", "message 1", ["well, " * 20 + "Paris</s>Berlin"], "Paris</s>Berlin</s>", ENDS)
    (problem,) = refused.value.problems
    assert problem.where == "row 1"
    assert "message 1 is trained on and spells the end token '</s>'" in problem.found
    assert "Paris</s>Berlin" in problem.found
    assert len(problem.found) < 200

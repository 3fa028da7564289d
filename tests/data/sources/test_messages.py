"""Turns are cleaned without changing what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.sources.messages import (
    ROLES,
    RowError,
    check_text,
    clean_messages,
    split_marks,
)


@given(text=st.text(st.characters()))
def test_text_passes_unchanged_exactly_if_a_tokenizer_can_encode_it(text: str) -> None:
    try:
        text.encode()
        can_be_encoded = "\0" not in text
    except UnicodeEncodeError:
        can_be_encoded = False
    if can_be_encoded:
        assert check_text(text, "here") == text
    else:
        with pytest.raises(RowError):
            check_text(text, "here")


@given(content=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_the_words_of_a_turn_are_never_changed(content: str) -> None:
    (message,) = clean_messages([{"role": "user", "content": content, "name": None}], "messages")
    assert message == {"role": "user", "content": content}


@pytest.mark.parametrize("written", [*ROLES, "Human", " GPT ", "Function_Call"])
def test_every_role_becomes_a_template_role(written: str) -> None:
    value = '{"name": "f", "arguments": {}}'
    (message,) = clean_messages([{"from": written, "value": value}], "conversations")
    assert message["role"] in ("system", "developer", "user", "assistant", "tool")


def test_a_call_without_arguments_has_none() -> None:
    calls = [{"type": "function", "function": {"name": "now", **written}} for written in ({}, {"arguments": ""})]
    first, message = clean_messages([{"role": "assistant", "tool_calls": [call]} for call in calls], "messages")
    assert first == message
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_parallel_sharegpt_calls_are_calls_of_one_turn() -> None:
    value = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": null}}]'
    (message,) = clean_messages([{"from": "function_call", "value": value}], "conversations")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"x": None}},
    ]


ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("marks", "is_trained"),
    [
        ({"weight": 1}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),  # Arrow makes numbers beside nulls so.
        ({"weight": None}, True),
        ({"train": True}, True),
        ({"train": False}, False),
        ({"training": False}, False),
        ({"training": True, "weight": 1}, True),
    ],
)
def test_a_turn_is_marked_as_openai_or_axolotl_do_and_templates_do_not_see_it(
    marks: dict[str, object], is_trained: bool
) -> None:
    for marked in ({**ANSWER, **marks}, {"from": "gpt", "value": "4", **marks}):
        turns, untrained = split_marks(clean_messages([marked, ANSWER], "turns"))
        assert turns == [ANSWER, ANSWER]
        assert untrained == (set() if is_trained else {0})
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', **marks}
    turns, untrained = split_marks(clean_messages([call], "turns"))
    assert set(turns[0]) == {"role", "content", "tool_calls"}
    assert untrained == (set() if is_trained else {0})


@pytest.mark.parametrize(
    ("marked", "found"),
    [
        ({**ANSWER, "weight": 0.5}, "turns[1].weight is 0.5"),
        ({**ANSWER, "weight": False}, "turns[1].weight is False"),
        ({**ANSWER, "weight": "0"}, "turns[1].weight is '0'"),
        ({**ANSWER, "train": 0}, "turns[1].train is 0"),
        ({**ANSWER, "training": []}, "turns[1].training is []"),
        ({**ANSWER, "training": False, "weight": 1}, "turns[1] has weight and training, which contradict"),
        ({**ANSWER, "train_detail": [{"begin": 0, "end": 3}]}, "turns[1].train_detail marks parts of a turn"),
        ({"role": "user", "content": "?", "train": True}, "turns[1].train asks to train on a turn of the role 'user'"),
    ],
)
def test_any_other_mark_is_an_error_that_names_the_turn(marked: dict[str, object], found: str) -> None:
    with pytest.raises(RowError) as refused:
        clean_messages([ANSWER, marked], "turns")
    assert found in refused.value.found
    assert refused.value.remedy


def test_a_user_s_turn_may_be_marked_as_what_it_is() -> None:
    turns, untrained = split_marks(clean_messages([{"role": "user", "content": "?", "weight": 0}], "messages"))
    assert (turns, untrained) == ([{"role": "user", "content": "?"}], {0})

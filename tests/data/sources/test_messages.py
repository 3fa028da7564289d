"""Cleaning of chat messages: roles, tool calls, and marks that exclude turns from the loss."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.sources.messages import (
    ROLES,
    RowError,
    check_answer,
    check_text,
    clean_messages,
    find_roles,
    read_chat_extras,
    refuse_guesses,
    split_marks,
)


@given(text=st.text(st.characters()))
def test_check_text_accepts_exactly_encodable_text(text: str) -> None:
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
def test_clean_messages_keeps_content(content: str) -> None:
    (message,) = clean_messages([{"role": "user", "content": content, "name": None}], "messages")
    assert message == {"role": "user", "content": content}


@pytest.mark.parametrize("written", [*ROLES, "Human", " GPT ", "Function_Call"])
def test_every_role_maps_to_template_role(written: str) -> None:
    value = '{"name": "f", "arguments": {}}'
    (message,) = clean_messages([{"from": written, "value": value}], "conversations")
    assert message["role"] in ("system", "developer", "user", "assistant", "tool")


@pytest.mark.parametrize(
    "written", [{"role": None, "from": "function_call"}, {"from": " tool_call"}, {"from": None, "role": "tool_call"}]
)
def test_call_is_read_under_each_spelling_of_its_role(written: dict[str, object]) -> None:
    (message,) = clean_messages([{**written, "content": '{"name": "f", "arguments": {}}'}], "messages")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert find_roles([written]) == ["assistant"]


def test_invalid_call_in_a_turn_is_located() -> None:
    with pytest.raises(RowError, match=r"messages\[0\]\.content\[0\] names no function"):
        clean_messages([{"role": "tool_call", "content": "{}"}], "messages")


@pytest.mark.parametrize("written", [{}, {"arguments": ""}, {"arguments": None}])
def test_tool_call_without_arguments_gets_empty_object(written: dict[str, object]) -> None:
    call = {"type": "function", "function": {"name": "now", **written}}
    (message,) = clean_messages([{"role": "assistant", "tool_calls": [call]}], "messages")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_tool_calls_may_be_a_text() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    turn: dict[str, object] = {"role": "assistant", "content": "Hi"}
    (listed, written, empty, null) = clean_messages(
        [{**turn, "tool_calls": value} for value in (calls, json.dumps(calls), "", "null")], "messages"
    )
    assert listed == written == {**turn, "tool_calls": calls}
    assert empty == null == turn


def test_nulls_of_aligned_calls_and_tools_are_removed_but_not_those_of_a_text() -> None:
    arguments = {"city": "Paris", "where": {"country": "F", "zone": None}, "zone": None}
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}
    expected = {"city": "Paris", "where": {"country": "F"}}
    for turn in ({"role": "assistant", "tool_calls": [call]}, {"from": "function_call", "value": call["function"]}):
        (message,) = clean_messages([turn], "messages")
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": expected}}]
    written = {"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    for value in ([written], json.dumps([call | {"id": "1"}])):
        (message,) = clean_messages([{"role": "assistant", "tool_calls": value}], "messages")
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
    city = {"type": "string", "default": None, "enum": ["Paris", None]}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"city": city}}}
    aligned = {"name": "f", "parameters": {"type": "object", "properties": {"city": city | {"items": None}, "z": None}}}
    assert read_chat_extras({"tools": [aligned]}) == {"tools": [tool]}
    assert read_chat_extras({"tools": json.dumps([aligned])}) == {"tools": [aligned]}


def test_call_without_function_object_is_read() -> None:
    calls = [{"id": "1", "name": "f", "arguments": '{"x": 1}'}, {"name": "g"}]
    (message,) = clean_messages([{"role": "assistant", "tool_calls": calls}], "messages")
    assert message["tool_calls"] == [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ufeff \u200d"])
def test_answer_without_a_visible_character_is_refused(text: str) -> None:
    with pytest.raises(RowError, match="the answer is empty"):
        check_answer(text, "the answer")
    assert check_answer(f"{text}\u0646\u200c\u0645", "the answer")


@pytest.mark.parametrize("calls", ["", " ", [{"name": "f"}], None])
def test_answer_without_content_needs_calls(calls: object) -> None:
    with pytest.raises(RowError, match=r"messages\[0\]\.content is empty"):
        clean_messages([{"role": "assistant", "content": "", "function_calls": calls}], "messages")


def test_parallel_sharegpt_calls_share_one_turn() -> None:
    value = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": null}}]'
    (message,) = clean_messages([{"from": "function_call", "value": value}], "conversations")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"x": None}},
    ]


@pytest.mark.parametrize(
    "value", [b"png", Decimal("0.5"), {"a": {"b": b"png"}}, [datetime(2024, 5, 1)], {"a": "\ud83d"}]
)
def test_value_that_is_not_json_is_located(value: object) -> None:
    with pytest.raises(RowError, match=r"turns\[0\]\.extra (cannot be written as JSON|holds half a surrogate)"):
        clean_messages([{**ANSWER, "extra": value}], "turns")
    assert clean_messages([{**ANSWER, "extra": [float("nan")]}], "turns")[0]["extra"]


ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_is_not_a_string_is_error(key: str) -> None:
    with pytest.raises(RowError, match=rf"turns\[0\]\.{key} is a list, not a string"):
        clean_messages([{**ANSWER, key: ["Count."]}], "turns")


@pytest.mark.parametrize(
    ("marks", "is_trained"),
    [
        ({"weight": 1}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),  # pandas converts integers in a column with nulls to floats.
        ({"weight": None}, True),
        ({"train": True}, True),
        ({"train": False}, False),
        ({"training": False}, False),
        ({"training": True, "weight": 1}, True),
        ({"loss": True}, True),
        ({"loss": False}, False),
    ],
)
def test_loss_marks_are_removed_and_recorded(marks: dict[str, object], is_trained: bool) -> None:
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
def test_invalid_loss_mark_is_error(marked: dict[str, object], found: str) -> None:
    with pytest.raises(RowError) as refused:
        clean_messages([ANSWER, marked], "turns")
    assert found in refused.value.found
    assert refused.value.remedy


def test_user_turn_accepts_zero_weight() -> None:
    turns, untrained = split_marks(clean_messages([{"role": "user", "content": "?", "weight": 0}], "messages"))
    assert (turns, untrained) == ([{"role": "user", "content": "?"}], {0})


def test_fields_of_rows_without_media_are_not_written_out() -> None:
    class Fields(dict[str, object]):
        def __repr__(self) -> str:
            raise AssertionError("a copy of the text")

    refuse_guesses({"text": "", "images": []}, Fields())

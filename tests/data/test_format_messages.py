"""Turns are cleaned without changing what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.format_messages import ROLES, SHAREGPT_ROLES, RowError, check_text, clean_messages, parse_tools


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


@pytest.mark.parametrize("written", SHAREGPT_ROLES)
def test_every_sharegpt_role_becomes_a_template_role(written: str) -> None:
    value = '{"name": "f", "arguments": {}}'
    (message,) = clean_messages([{"from": written, "value": value}], "conversations", SHAREGPT_ROLES)
    assert message["role"] in ROLES


def test_a_call_without_arguments_has_none() -> None:
    call = {"type": "function", "function": {"name": "now"}}
    (message,) = clean_messages([{"role": "assistant", "tool_calls": [call]}], "messages")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_parallel_sharegpt_calls_are_calls_of_one_turn() -> None:
    value = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": null}}]'
    (message,) = clean_messages([{"from": "function_call", "value": value}], "conversations", SHAREGPT_ROLES)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"x": None}},
    ]


@pytest.mark.parametrize("nothing", [None, "", [], "[]"])
def test_no_tools_are_none(nothing: object) -> None:
    assert parse_tools(nothing) is None

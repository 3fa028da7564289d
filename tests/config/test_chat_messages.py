"""``normalise_message``: null values are dropped, and templates find reasoning under each of its common keys."""

from __future__ import annotations

import pytest

from recipes_lib.config.chat_messages import normalise_message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "Hi"}, {}),
        ({"role": "assistant", "content": None}, {"content": None}),
        ({"role": "user", "content": "Hi", "name": None}, {"name": None}),
        ({"role": "assistant", "content": "3", "reasoning": "c"}, {"thinking": "c", "reasoning_content": "c"}),
        ({"role": "assistant", "content": "3", "thinking": "a", "reasoning_content": "b"}, {}),
        ({"role": "assistant", "content": "3", "thinking": None, "reasoning_content": "b"}, {"thinking": "b"}),
    ],
)
def test_message_is_normalised(message, expected):
    before = dict(message)
    changed = {key: value for key, value in {**message, **expected}.items() if value is not None}
    assert normalise_message(message) == changed
    assert message == before

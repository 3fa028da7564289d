"""Chat messages as templates get them: the same in training rows and in the scores of reward models."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final

TEMPLATE_DATE: Final = datetime.datetime(2025, 1, 1)
"""Date of ``strftime_now`` in templates: fixed, so that prepared sets, resumed runs and scores are those of any day."""
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may have its reasoning, in order of precedence."""


def normalise_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message, normalised as by ``apply_chat_template``: no null keys, reasoning under all names."""
    if len(message) == 2 and message.get("content") is not None:
        return dict(message)  # Most messages have only a role and a content.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING_KEYS if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}

"""Messages as chat templates get them; token ids: vocabulary size, tokens before a text, ends of answers."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

TEMPLATE_DATE: Final = datetime.datetime(2025, 1, 1)
"""Date of ``strftime_now`` in templates: fixed, so that prepared sets, resumed runs and scores are those of any day."""
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may have its reasoning, in order of precedence."""
NUM_OF_END: Final = 3
"""Number of last tokens searched for the end token of an answer: a chat template may add a line break after it."""


def normalise_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message, normalised as by ``apply_chat_template``: no null keys, reasoning under all names."""
    if len(message) == 2 and message.get("content") is not None:
        return dict(message)  # Most messages have only a role and a content.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING_KEYS if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


class Vocabulary(Protocol):
    """Protocol of a tokenizer's vocabulary."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return token -> id, added tokens included."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> added token, with the attribute ``special``."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; ``None`` without one."""


def count_ids(tokenizer: Vocabulary) -> int:
    """Return the largest token id plus 1 (above the number of tokens if there are unused ids); 0 without tokens."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def find_end_tokens(tokenizer: Vocabulary) -> Collection[int]:
    """Return the ids that may end an answer, special tokens and EOS: each answer must end with one, and train on it."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special if tokenizer.eos_token_id is None else special | {tokenizer.eos_token_id}


def find_prefix(bare: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return the tokens that a tokenizer puts before a text: its start token, several, or none.

    Observed instead of read: the post-processor decides, and not every tokenizer has ``add_bos_token``. They need not
    include BOS: GLM's are ``[gMASK]<sop>``.

    Args:
        bare: Token ids of a text without special tokens.
        whole: Token ids of the same text with them.
    """
    places = (at for at in range(len(whole)) if [*whole[at : at + len(bare)]] == [*bare])
    return [*whole[: next(places, 0)]]


def count_before_end(answer: Any, end_tokens: Collection[int]) -> int:
    """Return the number of tokens before the end token, which is the last token or precedes a line break.

    Args:
        answer: Token ids, at least one; a list or an array.
        end_tokens: Ids from ``find_end_tokens``.
    """
    last = [int(token) for token in answer[-NUM_OF_END:]]
    num_after = next((index for index, token in enumerate(reversed(last)) if token in end_tokens), 0)
    return len(answer) - 1 - num_after

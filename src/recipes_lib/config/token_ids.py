"""Token ids of a tokenizer: their number, which sizes embeddings, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

NUM_OF_END: Final = 3
"""Number of last tokens that may contain the end of an answer: a template may add a line break after it."""


class Vocabulary(Protocol):
    """Protocol: the token ids of a tokenizer."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token, added ones too."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id, each of which is ``special`` or not."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-text token."""


def count_ids(tokenizer: Vocabulary) -> int:
    """Return the largest token id plus 1, which exceeds the number of tokens if ids are unused; 0 without tokens."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def find_end_tokens(tokenizer: Vocabulary) -> Collection[int]:
    """Return the ids of which one must end every answer and be trained on."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special if tokenizer.eos_token_id is None else special | {tokenizer.eos_token_id}


def count_before_end(answer: Any, end_tokens: Collection[int]) -> int:
    """Return the number of tokens before the end token: the last one, except for a line break.

    Args:
        answer: Ids, at least one; a list or an array.
        end_tokens: From ``find_end_tokens``.
    """
    last = [int(token) for token in answer[-NUM_OF_END:]]
    behind = next((behind for behind, token in enumerate(reversed(last)) if token in end_tokens), 0)
    return len(answer) - 1 - behind

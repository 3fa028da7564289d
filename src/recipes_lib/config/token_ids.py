"""Token ids of a tokenizer: their number, which sizes embeddings, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

NUM_OF_END: Final = 3
"""Among how many of its last tokens stands the one that ends an answer: a template may write a line break behind."""


class Vocabulary(Protocol):
    """A tokenizer, as far as its ids go."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token, added ones too."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id, each of which is ``special`` or not."""

    @property
    def eos_token_id(self) -> int | None:
        """Of the end of a text."""


def count_ids(tokenizer: Vocabulary) -> int:
    """Return the largest id of a tokenizer and 1, more than its tokens where ids are left out; 0 when it has none."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def find_end_tokens(tokenizer: Vocabulary) -> Collection[int]:
    """Ids, one of which must end every answer and be trained on."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special if tokenizer.eos_token_id is None else special | {tokenizer.eos_token_id}


def count_before_end(answer: Any, end_tokens: Collection[int]) -> int:
    """Return how many tokens of an answer stand before the one that ends it: its last token but for a line break.

    Args:
        answer: Ids, at least one; a list or an array.
        end_tokens: From ``find_end_tokens``.
    """
    last = [int(token) for token in answer[-NUM_OF_END:]]
    behind = next((behind for behind, token in enumerate(reversed(last)) if token in end_tokens), 0)
    return len(answer) - 1 - behind

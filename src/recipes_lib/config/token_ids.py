"""How many ids a tokenizer counts, which sizes an embedding and every table with an entry for each id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Vocabulary(Protocol):
    """A tokenizer, as far as its ids go."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token, added ones too."""


def count_ids(tokenizer: Vocabulary) -> int:
    """Return the largest id of a tokenizer and 1, more than its tokens where ids are left out; 0 when it has none."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1

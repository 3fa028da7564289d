"""Pairs some of whose rejected answers are the chosen ones, broken off before their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes_lib.config.token_ids import count_before_end, find_end_tokens
from recipes_lib.data.pair_data import PairRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class UnfinishedAnswers:
    """Prepared pairs, a share of which teach that an answer without its end is worth less than the same with it.

    All answers of a data set are whole, so that a reward model never reads a score anywhere but at an end token; and a
    policy that runs out of tokens is then paid by chance. In a pair that is drawn here the rejected answer is the
    chosen one without what ends it, in half of them without more than that, in the others cut at any token. Which
    pairs are drawn, and where they are cut, follows from ``seed`` and the number of the pair, in every epoch alike.
    """

    def __init__(self, pairs: PairRows, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> None:
        """Wrap pairs, which are read when they are asked for.

        Args:
            pairs: With ``chosen_ids`` and ``rejected_ids``; a ``margin`` of a pair that is drawn becomes 0.
            tokenizer: Of the model.
            share: Of the pairs, in ``[0, 1]``; answers of a single token stay as they are.
            seed: Of the run.
        """
        self._pairs, self._share, self._seed = pairs, share, seed
        self._end_tokens = find_end_tokens(tokenizer)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        pair: Mapping[str, Any] = self._pairs[index]
        random = np.random.default_rng([self._seed, index])
        unfinished = pair["chosen_ids"][: count_before_end(pair["chosen_ids"], self._end_tokens)]
        if random.random() >= self._share or not len(unfinished):
            return pair
        if random.random() < 0.5:
            unfinished = unfinished[: random.integers(1, len(unfinished), endpoint=True)]
        margin = {"margin": 0.0} if "margin" in pair else {}
        return {**pair, "rejected_ids": unfinished, **margin}

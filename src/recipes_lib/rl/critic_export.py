"""The trained critic on disk, as a reward model is: plain transformers, for another run or another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from recipes_lib.models.scoring import RewardStatistics, store_reward_statistics

CRITIC_FOLDER: Final = "critic"
"""Under ``output_dir``."""


def save_critic(critic: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a critic with all of its weights and its tokenizer.

    The folder is of a ``...ForSequenceClassification`` with one label. Such a head has no bias: the critic's is kept as
    the statistics of a reward model, whose score less ``reward_mean`` over ``reward_std`` is the value.

    Args:
        critic: From ``load_actor_critic``, not an adapter.
        tokenizer: Of the policy.
        folder: Where it goes.

    Source: ``tests/rl/test_critic_export.py``, which reads it as OpenRLHF and verl do.
    """
    bias = 0.0 if critic.score.bias is None else float(critic.score.bias)
    weights = {name: value for name, value in critic.state_dict().items() if name != "score.bias"}
    store_reward_statistics(critic, RewardStatistics(mean=-bias, std=1.0))
    critic.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)

"""What a run leaves: the policy, and the critic as a reward model is, for another run or another framework."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

from transformers import IntervalStrategy, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.models.scoring import RewardStatistics, store_reward_statistics
from recipes_lib.rl.models import ActorCritic
from recipes_lib.training.checkpointing import CheckpointingTrainer
from recipes_lib.training.sharded_states import gather_trained_state

CRITIC_FOLDER: Final = "critic"
"""Under ``output_dir``."""


def build_exporter(
    models: ActorCritic, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> CheckpointingTrainer:
    """What ``export_model`` takes: a trainer around the finished policy, which gathers it if need be and saves it."""
    exporting = copy.copy(args)
    # Upstream asks for held-out data where there is something to evaluate.
    exporting.eval_strategy = IntervalStrategy.NO
    return CheckpointingTrainer(model=models.drop_critic(), args=exporting, processing_class=tokenizer)


def save_critic(critic: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, *, is_main: bool = True) -> None:
    """Save a critic with all of its weights and its tokenizer; every process must call.

    The folder is of a ``...ForSequenceClassification`` with one label. Such a head has no bias: the critic's is kept as
    the statistics of a reward model, whose score less ``reward_mean`` over ``reward_std`` is the value. Where it is
    sharded it is gathered tensor by tensor, on the host of the main process alone.

    Args:
        critic: From ``load_actor_critic``, not an adapter.
        tokenizer: Of the policy.
        folder: Where it goes.
        is_main: Whether this process writes.

    Source: ``tests/rl/test_export.py``, which reads it as OpenRLHF and verl do.
    """
    weights = gather_trained_state(critic)
    if not is_main:
        return
    bias = float(weights.pop("score.bias", 0.0))
    store_reward_statistics(critic, RewardStatistics(mean=-bias, std=1.0))
    critic.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)

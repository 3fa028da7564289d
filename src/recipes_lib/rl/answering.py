"""How a run's settings become what answers its prompts, for every stage that samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.models.sampling import Sampling
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.engines import build_generator
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.rewards import Rewards, verify_positions
from recipes_lib.training.arguments import build_autocast, get_compute_dtype
from recipes_lib.training.progress import TrainingProgress


def build_collector(
    config: RecipeConfig,
    args: TrainingArguments,
    models: ActorCritic,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    progress: TrainingProgress,
    beat: Callable[[], None],
    max_length: int,
) -> Collector:
    """Build what answers prompts and scores the answers.

    Args:
        config: What samples, how long an answer is, and the temperature.
        args: How many rows are sampled or read at once, the seed, the device and the precision.
        models: Of the run.
        rewards: Score the answers.
        tokenizer: Of the policy.
        progress: What the terminal shows.
        beat: Called whenever there is progress in sampling.
        max_length: Tokens of the longest prompt with its longest answer.

    Raises:
        ConfigError: As ``build_generator`` and ``verify_positions``.
    """
    if rewards.model is not None:
        model = rewards.model
        if warning := verify_positions(model.model.config, model.tokenizer, tokenizer, max_length):
            progress.say(warning)
    # Where FSDP2 shards, it gathers weights in the type of products.
    precision = contextlib.nullcontext if models.is_sharded else build_autocast(args)
    sampling = Sampling(
        stop_ids=models.stop_ids,
        pad_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        response_length=config.rewards.response_length,
        temperature=config.rewards.temperature,
        beat=beat,
    )
    generator = build_generator(
        config.engine,
        sampling,
        batch_size=args.per_device_eval_batch_size,
        precision=precision,
        dtype=get_compute_dtype(args),
        device=args.device,
        is_main=args.process_index == 0,
    )
    return Collector(
        models=models,
        generator=generator,
        rewards=rewards,
        tokenizer=tokenizer,
        response_length=config.rewards.response_length,
        temperature=config.rewards.temperature,
        batch_size=args.per_device_eval_batch_size,
        seed=args.seed,
        device=args.device,
        precision=precision,
        progress=progress,
    )


def hold_policy(policy: Any, stop_ids: Sequence[int]) -> ActorCritic:
    """A policy that only answers: critic and reference are never asked for, and it stands in for them."""
    return ActorCritic(policy=policy, critic=policy, own_reference=policy, stop_ids=list(stop_ids))

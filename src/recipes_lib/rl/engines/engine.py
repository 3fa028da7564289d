"""The choice of generation engine, and its log-probability gap to the training graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import EngineConfig, RecipeConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.generation.sampling import GenerateBackend, Generator, Sampling
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.engines.continuous_batching import ContinuousBatchingBackend
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import TOLERANCE
from recipes_lib.rl.ppo_math import MAX_IMPORTANCE_WEIGHT
from recipes_lib.rl.rewards import Rewards, verify_positions
from recipes_lib.rl.rollout import Rollout
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_autocast, get_compute_dtype

MAX_GAP: Final = 1.0
"""Nats a token, on average, beyond which an engine has not rounded differently but has other weights."""


def build_generator(
    config: EngineConfig,
    sampling: Sampling,
    *,
    batch_size: int,
    precision: Any,
    dtype: torch.dtype,
    device: torch.device,
    is_main: bool,
) -> Generator:
    """Build the engine that a run asks for; ``generate`` unless it asks for another.

    Args:
        config: Which.
        sampling: How answers are sampled.
        batch_size: Prompts of a batch of ``generate``.
        precision: Gives the context in which products are computed.
        dtype: Of those products.
        device: Of the models.
        is_main: Whether this process sends weights to an engine apart.

    Raises:
        ConfigError: As ``ContinuousBatchingBackend`` and ``connect``.
    """
    if config.use_vllm:
        # Imports vLLM where it is installed.
        from recipes_lib.rl.engines.vllm_server import connect

        return connect(config, sampling, device=device, is_main=is_main)
    if config.use_transformers_continuous_batching:
        options = config.transformers_continuous_batching_config
        return ContinuousBatchingBackend(sampling, dtype=dtype, options=options)
    return GenerateBackend(sampling, batch_size=batch_size, precision=precision)


def verify_engine(rollout: Rollout, generator: Generator, dtype: torch.dtype) -> str:
    """Hold an engine's log-probabilities against the training graph's, and return what was found, in a line.

    Within ``TOLERANCE`` they are the same up to rounding. Beyond, the weights of ``compute_importance_weights`` correct
    for the difference, up to their cap.

    Args:
        rollout: All answers of the first iteration of a process.
        generator: What sampled them.
        dtype: Of products.

    Raises:
        DivergedError: They differ by more than ``MAX_GAP``: the engine answers for another model.
    """
    gap = float((rollout.logps - rollout.engine_logps)[rollout.mask].abs().mean())
    if not gap <= MAX_GAP:
        raise DivergedError(
            f"log-probabilities of {generator.name} and of the policy differ by {gap:.2g} nats a token: it does not "
            "have the policy's weights, or samples at another temperature"
        )
    line = f"{generator.name} and the policy differ by {gap:.1e} nats a token"
    if gap > TOLERANCE[dtype]:
        line += (
            f", where rounding explains {TOLERANCE[dtype]:g}: tokens are weighted by the ratio, up to "
            f"{MAX_IMPORTANCE_WEIGHT:g}"
        )
    if not generator.follows_seed:
        line += "; its answers do not follow from the seed alone, so a run that goes on takes another path"
    return line


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

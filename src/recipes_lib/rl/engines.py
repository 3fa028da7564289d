"""Which engine samples the answers of a run, and how far its log-probabilities may be from the training graph's."""

from __future__ import annotations

from typing import Any, Final

import torch

from recipes_lib.config.schema import EngineConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.sampling import GenerateBackend, Generator, Sampling
from recipes_lib.rl.continuous_batching import ContinuousBatchingBackend
from recipes_lib.rl.monitor import TOLERANCE
from recipes_lib.rl.ppo_math import MAX_IMPORTANCE_WEIGHT
from recipes_lib.rl.rollout import Rollout

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
        from recipes_lib.rl.vllm_server import connect

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

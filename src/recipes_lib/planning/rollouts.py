"""Estimated duration of an iteration of reinforcement learning: sampling, scoring, updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.compute import (
    FORWARD_AND_BACKWARD,
    compute_flops_per_token,
    compute_hours,
    compute_model_size,
    has_policy_reference,
)
from recipes_lib.planning.decoding import Decoding, estimate_decoding, find_forward_mfu
from recipes_lib.planning.devices import Device
from recipes_lib.planning.memory import Batch
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.planning.search import Traffic, count_gathered, count_traffic, time_traffic


@dataclass(frozen=True, slots=True)
class Iteration:
    """Estimated duration of an iteration, in seconds.

    Attributes:
        sampling: Seconds of sampling, all answers of full length, and of gathering the weights for it.
        scoring: Seconds of forward passes of policy, reference, critic and reward model.
        updates: Seconds of the updates of policy and critic.
        decoding: Sampling of one GPU.
        lengths: Tokens of a prompt, and of an answer.
        is_overlapped: Whether a server samples during the updates.
    """

    sampling: float
    scoring: float
    updates: float
    decoding: Decoding
    lengths: tuple[int, int]
    is_overlapped: bool

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        rest = self.scoring + self.updates
        return max(self.sampling, rest) if self.is_overlapped else self.sampling + rest


def list_readers(config: RecipeConfig) -> list[str]:
    """Return the names of the models that run a forward pass over each answer."""
    models = {
        "policy": True,
        "critic": config.recipe == "ppo",
        "reference": has_policy_reference(config),
        "reward model": config.rewards.reward_model_name_or_path,
    }
    return [name for name, reads in models.items() if reads]


def estimate_iteration(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    num_answers: int,
    num_passes: int,
    layout: Layout,
    device: Device,
    mfu: float,
) -> Iteration:
    """Estimate an iteration of PPO, RLOO or GRPO.

    Sampling is that of ``estimate_decoding``. Forward passes and updates run at ``mfu``, the former without
    recomputation; critic, reference and reward model count as models of the policy's size. Traffic of weights and
    gradients overlaps with compute. A sharded policy is gathered once for sampling. The transfer of weights to an
    engine is ignored.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the policy.
        num_answers: Answers per iteration over all GPUs.
        num_passes: Epochs over these answers.
        layout: Layout of the training processes; a vLLM server counts as equally many further GPUs.
        device: GPU.
        mfu: Model FLOPs utilisation of forward passes and updates.

    Source: ``tests/planning/test_rollouts.py``.
    """
    engine, held, num_gpus = config.engine, Batch.of(config, Layout("")), layout.num_gpus
    lengths = held.length - held.num_predicted, held.num_predicted
    each, size = math.ceil(num_answers / num_gpus), compute_model_size(model_config).total
    decoding = estimate_decoding(config, model_config, each, lengths, device, mfu)
    reading = find_forward_mfu(config, mfu)

    def time(flops: float, num_tokens: int, share: float) -> float:
        return 3600 * compute_hours(flops * num_answers * num_tokens, num_gpus, device.flops, share)

    flops = compute_flops_per_token(model_config, held.length)
    forward = (flops.body + flops.head) / FORWARD_AND_BACKWARD
    trained = compute_flops_per_token(model_config, held.length, is_frozen=config.adapter.use_peft)
    readers, num_trained = list_readers(config), 1 + (config.recipe == "ppo")
    sent = time_traffic(count_traffic(config, model_config, size, layout), layout, device)
    # Each forward pass gathers the weights; for sampling they are gathered, or sent to the engine, once.
    gathering = time_traffic(Traffic(model=count_gathered(config, size, layout)), layout, device).model
    num_passes_read = len(readers) * math.ceil(each / config.read("per_device_eval_batch_size"))
    per_step = held.num_rows * config.read("gradient_accumulation_steps") * layout.num_processes
    num_steps = num_passes * num_answers / per_step
    computing = num_passes * time(trained.body + trained.head, held.length, mfu)
    return Iteration(
        sampling=gathering + decoding.seconds,
        scoring=max(len(readers) * time(forward, held.length, reading), num_passes_read * gathering),
        # Traffic with the host does not overlap: it waits for the optimizer step there.
        updates=num_trained * (max(computing, num_steps * (sent.model + sent.replicas)) + num_steps * sent.host),
        decoding=decoding,
        lengths=lengths,
        is_overlapped=bool(engine.max_staleness),
    )

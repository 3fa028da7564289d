"""Estimated duration of an iteration of reinforcement learning: sampling, scoring, updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning.activations import list_keys
from recipes_lib.planning.compute import (
    FORWARD_AND_BACKWARD,
    compute_flops_per_token,
    compute_hours,
    compute_model_size,
    count_features,
    has_policy_reference,
)
from recipes_lib.planning.devices import Device, find_overhead
from recipes_lib.planning.memory import Batch
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.planning.search import Traffic, count_gathered, count_traffic, time_traffic

MAX_SEQUENCES: Final = 256
"""Answers that continuous batching samples at once on a GPU: vLLM's ``max_num_seqs``."""
_NARROW: Final = 2
"""Bytes per weight, key or value while sampling, in 16 bits."""
_HOST_SECONDS: Final = 1 / 25.5 / 32
"""Host time per layer and decoding step without CUDA graphs, as in ``generate``, for any batch size.

Source: PyTorch, "Accelerating Generative AI with PyTorch II: GPT, Fast" (2023): 25.5 tokens per second of Llama 2 7B
(32 layers) on an A100, bound by the host.
"""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Estimated duration of an iteration, in seconds.

    Attributes:
        sampling: Seconds of sampling, all answers of full length.
        scoring: Seconds of forward passes of policy, reference, critic and reward model.
        updates: Seconds of the updates of policy and critic.
        batch: Answers that a GPU samples at once.
        num_batches: Number of such batches, one after the other.
        prompt: Tokens per prompt.
        answer: Tokens per answer.
        is_overlapped: Whether a server samples during the updates.
    """

    sampling: float
    scoring: float
    updates: float
    batch: int
    num_batches: int
    prompt: int
    answer: int
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
    peak: float,
    mfu: float,
) -> Iteration:
    """Estimate an iteration of PPO, RLOO or GRPO.

    A decoding step takes the longest of three: reading the weights and the KV cache of all answers at full memory
    bandwidth, computing at the peak, and launching kernels on the host. Forward passes and updates run at ``mfu``, the
    former without recomputation; critic, reference and reward model count as models of the policy's size. Traffic of
    weights and gradients overlaps with compute. A sharded policy is gathered once for sampling. Host time of an engine
    and the transfer of weights to it are ignored.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the policy.
        num_answers: Answers per iteration over all GPUs.
        num_passes: Epochs over these answers.
        layout: Layout of the training processes; a vLLM server counts as equally many further GPUs.
        device: GPU.
        peak: FLOP/s of the GPU.
        mfu: Model FLOPs utilisation of forward passes and updates.

    Source: the memory-bound decoding of Pope et al. 2022, section 2; ``tests/planning/test_rollouts.py``.
    """
    engine, held, num_gpus = config.engine, Batch.of(config, Layout("")), layout.num_gpus
    answer, prompt = held.num_predicted, held.length - held.num_predicted
    each = math.ceil(num_answers / num_gpus)
    is_continuous = engine.use_vllm or engine.use_transformers_continuous_batching
    batch = min(each, MAX_SEQUENCES if is_continuous else config.read("per_device_eval_batch_size"))
    num_batches = math.ceil(each / batch)
    whole, num_layers = compute_model_size(model_config), model_config.get_text_config().num_hidden_layers
    # Bytes of keys and values that a decoding step reads per answer: of the prompt and on average half of the answer.
    row = _NARROW * 2 * num_layers * count_features(model_config)[1] * (prompt + answer / 2)
    host = 0 if is_continuous else _HOST_SECONDS * num_layers
    # Seconds of a decoding step: bound by memory bandwidth, by compute, or by the host. A batch reads all experts.
    token = max((_NARROW * whole.total + batch * row) / device.bandwidth, 2 * whole.active * batch / peak, host)
    # Forward passes without gradients recompute nothing, so that their MFU is higher.
    plain = config.with_training(list_keys("none"))
    reading = mfu * find_overhead(plain)[0] / find_overhead(config)[0]

    def time(flops: float, num_tokens: int, share: float) -> float:
        return 3600 * compute_hours(flops * num_answers * num_tokens, num_gpus, peak, share)

    flops = compute_flops_per_token(model_config, held.length)
    forward = (flops.body + flops.head) / FORWARD_AND_BACKWARD
    trained = compute_flops_per_token(model_config, held.length, is_frozen=config.adapter.use_peft)
    readers, num_trained = list_readers(config), 1 + (config.recipe == "ppo")
    sent = time_traffic(count_traffic(config, model_config, whole.total, layout), layout, device)
    # Each forward pass gathers the weights; for sampling they are gathered, or sent to the engine, once.
    gathering = time_traffic(Traffic(model=count_gathered(config, whole.total, layout)), layout, device).model
    num_passes_read = len(readers) * math.ceil(each / config.read("per_device_eval_batch_size"))
    per_step = held.num_rows * config.read("gradient_accumulation_steps") * layout.num_processes
    num_steps = num_passes * num_answers / per_step
    computing = num_passes * time(trained.body + trained.head, held.length, mfu)
    return Iteration(
        sampling=gathering + time(forward, prompt, reading) + num_batches * answer * token,
        scoring=max(len(readers) * time(forward, held.length, reading), num_passes_read * gathering),
        # Traffic with the host does not overlap: it waits for the optimizer step there.
        updates=num_trained * (max(computing, num_steps * (sent.model + sent.replicas)) + num_steps * sent.host),
        batch=batch,
        num_batches=num_batches,
        prompt=prompt,
        answer=answer,
        is_overlapped=bool(engine.max_staleness),
    )

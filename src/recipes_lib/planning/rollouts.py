"""Estimated seconds of an iteration of reinforcement learning: sampling, scoring, updates."""

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
)
from recipes_lib.planning.devices import Device, find_overhead
from recipes_lib.planning.memory import Batch
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.planning.search import Traffic, count_gathered, count_traffic, time_traffic

MAX_SEQUENCES: Final = 256
"""Answers that a continuous batch of one GPU holds at a time: vLLM's ``max_num_seqs``."""
_NARROW: Final = 2
"""Bytes of a weight, key or value while sampling."""
_HOST_SECONDS: Final = 1 / 25.5 / 32
"""Of a layer and a token, where the host starts every kernel by itself, as ``generate`` does; whatever the batch.

Source: PyTorch, "Accelerating Generative AI with PyTorch II: GPT, Fast" (2023): 25.5 tokens a second of Llama 2 7B, 32
layers, on an A100, bound by the host.
"""


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration, in seconds.

    Attributes:
        sampling: The policy's answers, all of full length.
        scoring: Forward passes of policy, reference, critic and reward model.
        updates: Of the policy, and of the critic.
        batch: Answers that a GPU samples at a time.
        num_batches: Such batches, one after the other.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
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
        """The whole iteration."""
        rest = self.scoring + self.updates
        return max(self.sampling, rest) if self.is_overlapped else self.sampling + rest


def list_readers(config: RecipeConfig) -> list[str]:
    """Return the models that read each answer in a forward pass of their own."""
    is_ppo = config.recipe == "ppo"
    models = {
        "policy": True,
        "critic": is_ppo,
        "reference": is_ppo or config.read("beta"),
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

    Each decoding step of a batch reads the weights once and the KV cache of every answer, at full memory bandwidth; or
    computes at the peak; or waits for the host, whichever takes longest. Log-probabilities and updates are FLOPs at
    ``mfu``, the former without recomputation; critic, reference and reward model count as models of the policy's size.
    Weights and gradients travel meanwhile: what takes longer counts. A sharded policy is gathered once to be sampled
    from. Host time of an engine and the loading of weights into it are ignored.

    Args:
        config: The run.
        model_config: Of the policy.
        num_answers: Answers of an iteration over all GPUs.
        num_passes: Times that they are learnt from.
        layout: Of the training processes; a server of vLLM is counted as as many GPUs more.
        device: Each of the GPUs.
        peak: Its FLOP/s.
        mfu: Model FLOPs utilisation of reading and learning.

    Source: the memory-bound decoding of Pope et al. 2022, section 2; ``tests/planning/test_rollouts.py``.
    """
    engine, held, num_gpus = config.engine, Batch.of(config, Layout("")), layout.num_gpus
    answer, prompt = held.num_predicted, held.length - held.num_predicted
    each = math.ceil(num_answers / num_gpus)
    is_continuous = engine.use_vllm or engine.use_transformers_continuous_batching
    batch = min(each, MAX_SEQUENCES if is_continuous else config.read("per_device_eval_batch_size"))
    num_batches = math.ceil(each / batch)
    whole, num_layers = compute_model_size(model_config), model_config.get_text_config().num_hidden_layers
    size = whole.active
    # Keys and values that a token reads: of its prompt and, on average, of half the answer.
    row = _NARROW * 2 * num_layers * count_features(model_config)[1] * (prompt + answer / 2)
    host = 0 if is_continuous else _HOST_SECONDS * num_layers
    # A decoding step is bound by the memory's bandwidth, by its products, or by the host that launches kernels.
    token = max((_NARROW * size + batch * row) / device.bandwidth, 2 * size * batch / peak, host)
    # Forward passes without gradients recompute nothing, so they reach more of the peak than updates do.
    plain = config.with_training(list_keys("none"))
    reading = mfu * find_overhead(plain)[0] / find_overhead(config)[0]

    def time(flops: float, num_tokens: int, share: float) -> float:
        return 3600 * compute_hours(flops * num_answers * num_tokens, num_gpus, peak, share)

    flops = compute_flops_per_token(model_config, held.length)
    forward = (flops.body + flops.head) / FORWARD_AND_BACKWARD
    trained = compute_flops_per_token(model_config, held.length, is_frozen=config.adapter.use_peft)
    readers, num_trained = list_readers(config), 1 + (config.recipe == "ppo")
    sent = time_traffic(count_traffic(config, model_config, whole.total, layout), layout, device)
    # Forward passes gather each micro-batch anew; for sampling the policy is gathered, or sent to the engine, once.
    gathering = time_traffic(Traffic(model=count_gathered(whole.total, layout)), layout, device).model
    num_passes_read = len(readers) * math.ceil(each / config.read("per_device_eval_batch_size"))
    per_step = held.num_rows * config.read("gradient_accumulation_steps") * layout.num_processes
    num_steps = num_passes * num_answers / per_step
    computing = num_passes * time(trained.body + trained.head, held.length, mfu)
    return Iteration(
        sampling=gathering + time(forward, prompt, reading) + num_batches * answer * token,
        scoring=max(len(readers) * time(forward, held.length, reading), num_passes_read * gathering),
        # What the host sends and receives waits for the update on it.
        updates=num_trained * (max(computing, num_steps * sent.overlapped) + num_steps * sent.host),
        batch=batch,
        num_batches=num_batches,
        prompt=prompt,
        answer=answer,
        is_overlapped=bool(engine.max_staleness),
    )

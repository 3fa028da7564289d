"""Estimated duration of sampling: of the answers of reinforcement learning and of on-policy distillation."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

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
from recipes_lib.planning.memory import count_answers

MAX_SEQUENCES: Final = 256
"""Answers that continuous batching samples at once on a GPU: vLLM's ``max_num_seqs``."""
_NARROW: Final = 2
"""Bytes per weight, key or value while sampling, in 16 bits."""
_HOST_SECONDS: Final = 1 / 25.5 / 32
"""Host time per layer and decoding step without CUDA graphs, as in ``generate``, for any batch size.

Source: PyTorch, "Accelerating Generative AI with PyTorch II: GPT, Fast" (2023): 25.5 tokens per second of Llama 2 7B
(32 layers) on an A100, bound by the host.
"""


class Decoding(NamedTuple):
    """Sampling of the answers of one GPU.

    Attributes:
        seconds: Seconds of reading the prompts and of decoding, all answers of full length.
        num_answers: Answers.
        batch: Answers that are sampled at once.
        num_batches: Number of such batches, one after the other.
    """

    seconds: float
    num_answers: int
    batch: int
    num_batches: int


def find_forward_mfu(config: RecipeConfig, mfu: float) -> float:
    """Return the MFU of forward passes without gradients, which recompute nothing, from that of training."""
    plain = config.with_training(list_keys("none"))
    return mfu * find_overhead(plain)[0] / find_overhead(config)[0]


def estimate_decoding(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    num_answers: int,
    lengths: tuple[int, int],
    device: Device,
    mfu: float,
) -> Decoding:
    """Estimate the sampling of answers on one GPU.

    A decoding step takes the longest of three: reading the weights and the KV cache of all answers at full memory
    bandwidth, computing at the peak, and launching kernels on the host. Host time of an engine is ignored.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the model that answers.
        num_answers: Answers of this GPU.
        lengths: Tokens of a prompt, and of an answer.
        device: GPU.
        mfu: Model FLOPs utilisation of training.

    Source: the memory-bound decoding of Pope et al. 2022, section 2; ``tests/planning/test_rollouts.py``.
    """
    (prompt, answer), engine = lengths, config.engine
    is_continuous = engine.use_vllm or engine.use_transformers_continuous_batching
    batch = min(num_answers, MAX_SEQUENCES if is_continuous else config.read("per_device_eval_batch_size"))
    num_batches = math.ceil(num_answers / batch)
    whole, num_layers = compute_model_size(model_config), model_config.get_text_config().num_hidden_layers
    # Bytes of keys and values that a decoding step reads per answer: of the prompt and on average half of the answer.
    row = _NARROW * 2 * num_layers * count_features(model_config)[1] * (prompt + answer / 2)
    host = 0 if is_continuous else _HOST_SECONDS * num_layers
    # Seconds of a decoding step: bound by memory bandwidth, by compute, or by the host. A batch reads all experts.
    token = max((_NARROW * whole.total + batch * row) / device.bandwidth, 2 * whole.active * batch / device.flops, host)
    flops = compute_flops_per_token(model_config, prompt + answer)
    forward = (flops.body + flops.head) / FORWARD_AND_BACKWARD * num_answers * prompt
    reading = 3600 * compute_hours(forward, 1, device.flops, find_forward_mfu(config, mfu))
    return Decoding(reading + num_batches * answer * token, num_answers, batch, num_batches)


def estimate_on_policy(config: RecipeConfig, model_config: PreTrainedConfig, device: Device, mfu: float) -> Decoding:
    """Estimate the sampling of one on-policy step of distillation on one GPU, one micro-batch after the other.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the student.
        device: GPU.
        mfu: Model FLOPs utilisation of training.
    """
    answer, times = config.rewards.response_length, config.read("gradient_accumulation_steps")
    lengths = (min(answer, config.tokens.max_length or answer), answer)
    one = estimate_decoding(config, model_config, count_answers(config), lengths, device, mfu)
    return Decoding(times * one.seconds, times * one.num_answers, one.batch, times * one.num_batches)

"""Estimated durations: traffic of a step, sampling of answers, and iterations of reinforcement learning."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.planning import compute
from recipes_lib.planning.activations import list_keys, read_checkpointing
from recipes_lib.planning.devices import Device, find_overhead
from recipes_lib.planning.memory import Batch, count_answers
from recipes_lib.planning.memory_plan import Layout

NETWORK_BYTES: Final = 50e9
"""Bytes per second of a network adapter, of which a machine has one for each GPU: 400 Gbit/s.

Source: NVIDIA/nccl#1221: 320 GB/s for each GPU of a ring through the eight adapters of each of four machines.
"""
GPUS_OF_A_MACHINE: Final = 8
_HOST_BYTES: Final = 25e9
"""Bytes per second between a GPU and its host, by PCIe 4."""
_HOST_MEMORY_BYTES: Final = 300e9
"""Bytes per second of the host memory of a machine: half of the peak of 16 channels of DDR5-4800."""
_UPDATE_BYTES: Final = 28
"""Bytes per parameter that AdamW reads (weight, gradient, two states) and writes (all but the gradient) in 32 bits."""
MAX_SEQUENCES: Final = 256
"""Answers that continuous batching samples at once on a GPU: vLLM's ``max_num_seqs``."""
_NARROW: Final = 2
"""Bytes per weight, key or value while sampling, in 16 bits."""
_HOST_SECONDS: Final = 1 / 25.5 / 32
"""Host time per layer and decoding step without CUDA graphs, as in ``generate``, for any batch size.

Source: PyTorch, "Accelerating Generative AI with PyTorch II: GPT, Fast" (2023): 25.5 tokens per second of Llama 2 7B
(32 layers) on an A100, bound by the host.
"""


class Traffic(NamedTuple):
    """Bytes that a GPU sends per optimizer step, or the seconds that this takes.

    Attributes:
        model: Weights and gradients within data-parallel or sharding groups.
        replicas: Gradients of shards between the replicas of hybrid sharding.
        layers: Activations, or keys and values, within tensor- and context-parallel groups.
        stages: Hidden states and their gradients between pipeline stages.
        host: Weights and gradients between GPU and host.
        update: Weights, gradients and optimizer states in host memory, of an update on the CPU.
    """

    model: float = 0.0
    replicas: float = 0.0
    layers: float = 0.0
    stages: float = 0.0
    host: float = 0.0
    update: float = 0.0


def time_traffic(traffic: Traffic, layout: Layout, device: Device) -> Traffic:
    """Return the seconds of traffic from its bytes; groups above ``GPUS_OF_A_MACHINE`` GPUs use the network."""

    def time(num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Return the seconds in groups of every ``stride``-th of ``num_ranks`` consecutive GPUs."""
        rate = device.find_rate(min(num_ranks, GPUS_OF_A_MACHINE))
        if num_ranks > GPUS_OF_A_MACHINE:
            # Each GPU of a ring sends through the network adapters of all its GPUs in the machine.
            rate = min(rate, NETWORK_BYTES * max(GPUS_OF_A_MACHINE // stride, 1))
        return num_bytes / rate

    replica = layout.num_gpus // (layout.replicas * layout.pipeline_stages)
    return Traffic(
        model=time(traffic.model, replica, layout.tensor),
        replicas=time(traffic.replicas, layout.num_gpus, replica),
        layers=time(traffic.layers, layout.tensor * layout.context),
        stages=time(traffic.stages, layout.num_gpus, GPUS_OF_A_MACHINE),
        host=traffic.host / _HOST_BYTES,
        update=traffic.update * min(layout.num_gpus, GPUS_OF_A_MACHINE) / _HOST_MEMORY_BYTES,
    )


def count_gathered(config: RecipeConfig, num_parameters: float, layout: Layout) -> float:
    """Return the bytes that a GPU sends to gather a sharded model once, in 16 or 4 bits; 0 if it is replicated."""
    held = num_parameters / (layout.tensor * layout.pipeline_stages)
    return _find_width(config, 2) * held * _others(layout.shards.weights or layout.num_processes)


def _find_width(config: RecipeConfig, width: int) -> float:
    """Return the bytes of a weight: ``width``, or half a byte if it is sharded and gathered in 4 bits."""
    return 0.5 if config.quantization.load_in_4bit else width


def count_traffic(
    config: RecipeConfig, model_config: PreTrainedConfig, num_parameters: float, layout: Layout
) -> Traffic:
    """Count the traffic of an optimizer step.

    Weights are gathered in 16 bits, or 4, for the forward and the backward pass of each micro-batch, in pipeline stages
    once per step. Gradients are reduced in 32 bits, by DeepSpeed in 16: in DDP, ZeRO-1 and pipeline stages once per
    step, in FSDP2 (also between its replicas), ZeRO-2 and ZeRO-3 once per micro-batch. ZeRO-1 and ZeRO-2 reduce by
    all-reduce, and gather the updated weights once per step. A frozen model under an adapter has no gradients.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the trained model.
        num_parameters: Parameters of that model.
        layout: Layout of the processes.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7; DeepSpeed 0.19, ``use_multi_rank_bucket_allreduce`` and
    ``partition_gradients``; ``tests/planning/test_search.py``.
    """
    stages = layout.pipeline_stages
    held = num_parameters / (layout.tensor * stages)
    times = 1 if stages > 1 else config.read("gradient_accumulation_steps")
    trained = 0.0 if config.adapter.use_peft else held
    gradients = (2 if layout.is_deepspeed else 4) * trained
    layers, between = _count_hidden_states(config, model_config, layout)
    update = 0.0 if layout.shards.states else _UPDATE_BYTES * trained / layout.num_processes
    found = Traffic(layers=layers, stages=between, update=update)
    if layout.shards.weights == 1:
        passes = 2 * (1 if layout.shards.gradients == 1 else times) + layout.is_deepspeed
        return found._replace(model=passes * gradients * _others(layout.num_processes))
    group = layout.shards.weights or layout.num_processes
    return found._replace(
        model=times * (2 * count_gathered(config, num_parameters, layout) + _others(group) * gradients),
        replicas=times * 2 * _others(layout.replicas) * gradients / group,
        host=0.0 if layout.shards.weights else times * 2 * _find_width(config, 4) * held / layout.num_processes,
    )


def list_costs(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    num_parameters: float,
    layout: Layout,
    device: Device,
    seconds: float,
    mfu: float,
) -> dict[str, float]:
    """Return the seconds of an optimizer step by cause, from the ``seconds`` of its matrix products at ``mfu``.

    Traffic of weights and gradients overlaps with compute; traffic within layers does not. Answers of on-policy
    distillation are sampled in the share ``lmbda`` of the steps.
    """
    sent = time_traffic(count_traffic(config, model_config, num_parameters, layout), layout, device)
    bubble = seconds * (layout.pipeline_stages - 1) / config.read("gradient_accumulation_steps")
    share = config.distillation.lmbda
    return {
        "compute": seconds,
        "bubble": bubble,
        "weight traffic": max(sent.model + sent.replicas - seconds - bubble, 0.0),
        "layer traffic": sent.layers,
        "stage traffic": sent.stages,
        "host traffic": sent.host,
        "host update": sent.update,
        "sampling": share and share * estimate_on_policy(config, model_config, device, mfu).seconds,
    }


def _others(number: int) -> float:
    """Return the share of a tensor that each rank sends in a ring all-gather or reduce-scatter of ``number`` ranks."""
    return (number - 1) / number


def _count_hidden_states(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a GPU sends per optimizer step within layers, and between pipeline stages.

    In each pass, tensor parallelism all-reduces the hidden states after attention and MLP of each layer, and once
    outside of layers; context parallelism gathers keys and values, or exchanges heads for tokens (Ulysses).
    Recomputation of a layer is a third pass.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.2.
    """
    text: Any = model_config.get_text_config()
    batch = Batch.of(config, layout)
    num_tokens = batch.num_rows * batch.length * config.read("gradient_accumulation_steps")
    every = read_checkpointing(config).every
    passes = 2 + (1 / every if every else 0)
    num_layers, hidden = text.num_hidden_layers / layout.pipeline_stages, 2 * num_tokens * text.hidden_size
    queries, keys = (
        2 * num_tokens * compute.count_attended(text, 1, of_keys=of_keys) / layout.pipeline_stages
        for of_keys in (False, True)
    )
    sent = 2 * _others(layout.tensor) * hidden * (2 * num_layers + 1)
    if layout.gathers_keys:
        sent += (layout.context - 1) * keys
    elif layout.context > 1:
        sent += _others(layout.context) * (queries + keys)
    return passes * sent, 2 * hidden if layout.pipeline_stages > 1 else 0.0


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

    Source: the memory-bound decoding of Pope et al. 2022, section 2; ``tests/planning/test_timing.py``.
    """
    (prompt, answer), engine = lengths, config.engine
    is_continuous = engine.use_vllm or engine.use_transformers_continuous_batching
    batch = min(num_answers, MAX_SEQUENCES if is_continuous else config.read("per_device_eval_batch_size"))
    num_batches = math.ceil(num_answers / batch)
    whole = compute.compute_model_size(model_config)
    # Keys and values, or latents, that a decoding step reads per answer: of the prompt and on average half of it.
    text, length = model_config.get_text_config(), prompt + answer / 2
    latents = length * compute.count_latents(text) if engine.use_vllm else 0
    row = _NARROW * (latents or compute.count_attended(text, length, of_keys=True))
    host = 0 if is_continuous else _HOST_SECONDS * text.num_hidden_layers
    # Of experts, a batch reads those that its answers select, at most all.
    read = _NARROW * min(whole.total, batch * whole.active) + batch * row
    # Seconds of a decoding step: bound by memory bandwidth, by compute, or by the host.
    token = max(read / device.bandwidth, 2 * whole.active * batch / device.flops, host)
    flops = compute.compute_flops_per_token(model_config, prompt + answer)
    # Of a prompt, only the last token is projected to logits.
    forward = flops.total(num_answers * prompt, num_answers) / compute.FORWARD_AND_BACKWARD
    reading = 3600 * compute.compute_hours(forward, 1, device.flops, find_forward_mfu(config, mfu))
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


class Iteration(NamedTuple):
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
        "reference": compute.has_policy_reference(config),
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

    Source: ``tests/planning/test_timing.py``.
    """
    engine, held, num_gpus = config.engine, Batch.of(config, Layout("")), layout.num_gpus
    lengths = held.length - held.num_predicted, held.num_predicted
    each, size = math.ceil(num_answers / num_gpus), compute.compute_model_size(model_config).total
    decoding = estimate_decoding(config, model_config, each, lengths, device, mfu)
    reading = find_forward_mfu(config, mfu)

    def time(flops: compute.TokenFlops, share: float) -> float:
        # Logits are computed at the tokens of answers alone.
        counted = num_answers * flops.total(held.length, held.num_predicted)
        return 3600 * compute.compute_hours(counted, num_gpus, device.flops, share)

    trained = compute.compute_flops_per_token(model_config, held.length, is_frozen=config.adapter.use_peft)
    forward = time(compute.compute_flops_per_token(model_config, held.length), reading) / compute.FORWARD_AND_BACKWARD
    readers, num_trained = list_readers(config), 1 + (config.recipe == "ppo")
    sent = time_traffic(count_traffic(config, model_config, size, layout), layout, device)
    # Each forward pass gathers the weights; for sampling they are gathered, or sent to the engine, once.
    gathering = time_traffic(Traffic(model=count_gathered(config, size, layout)), layout, device).model
    num_passes_read = len(readers) * math.ceil(each / config.read("per_device_eval_batch_size"))
    per_step = held.num_rows * config.read("gradient_accumulation_steps") * layout.num_processes
    num_steps = num_passes * num_answers / per_step
    computing = num_passes * time(trained, mfu)
    return Iteration(
        sampling=gathering + decoding.seconds,
        scoring=max(len(readers) * forward, num_passes_read * gathering),
        # Traffic with the host does not overlap: it waits for the optimizer step there.
        updates=num_trained
        * (max(computing, num_steps * (sent.model + sent.replicas)) + num_steps * (sent.host + sent.update)),
        decoding=decoding,
        lengths=lengths,
        is_overlapped=bool(engine.max_staleness),
    )

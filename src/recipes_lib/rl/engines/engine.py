"""Generation engines: choice, continuous batching, and the log-probability gap to the training graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, TrainingArguments
from transformers.utils.import_utils import is_kernels_available

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, DivergedError, Problem
from recipes_lib.models.generation import (
    GenerateBackend,
    Generated,
    Generator,
    Sampling,
    build_plain_generation,
    join_answers,
)
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.rl.monitor import TOLERANCE
from recipes_lib.rl.objectives import PolicyObjective
from recipes_lib.rl.rollout import Rollout
from recipes_lib.training.trainers.arguments import get_compute_dtype

_SECONDS_TO_WAIT: Final = 1.0
_MAX_BLOCKS_ON_CPU: Final = 64
"""Blocks of the KV cache on a CPU, of 256 tokens by default, unless set; more answers at a time would not be faster."""


class ContinuousBatchingBackend(Generator):
    """Continuous batching by transformers: the policy's own modules with a paged KV cache, all prompts at once.

    Random numbers are drawn in an order that depends on scheduling, so equal seeds need not give equal answers. The
    cache exists only during sampling, and is freed before the updates.

    Source: transformers' ``ContinuousMixin``; log-probabilities are compared with those of the training graph in
    ``tests/rl/engines/test_continuous_batching.py``.
    """

    name = "continuous batching"
    uses_policy = True

    def __init__(self, sampling: Sampling, *, dtype: torch.dtype, options: Mapping[str, Any] | None) -> None:
        """Validate the options.

        Args:
            sampling: Length, temperature and stop tokens.
            dtype: Compute dtype; if the policy's weights have another one, a copy of them in this dtype samples.
            options: Fields of transformers' ``ContinuousBatchingConfig``.

        Raises:
            ConfigError: An option is unknown, or is set by this class.
        """
        self._sampling = sampling
        self._dtype = dtype
        self._options = dict(options or {})
        build_batching_options(self._options, 0, dtype)
        self._generation = build_plain_generation(sampling.stop_ids, sampling.pad_id, sampling.response_length)
        # top_k's default of 50 would sample from another distribution than that of the training graph.
        self._generation.update(do_sample=True, temperature=sampling.temperature, top_k=0)  # type: ignore[no-untyped-call]
        self._model: Any = None

    def load(self, policy: Any) -> None:
        """Use the policy itself, or update the copy in the compute dtype."""
        own = unwrap_adapter(policy)
        if own.dtype == self._dtype or getattr(own, "is_quantized", False):
            self._model = own
            return
        # A copy, because the engine's thread does not inherit autocast, and the KV cache has the dtype of the weights.
        if self._model is None:
            # As the memo of deepcopy, so that it never copies the weights in their own dtype.
            casts = {id(weight): nn.Parameter(weight.detach().to(self._dtype), False) for weight in own.parameters()}
            self._model = copy.deepcopy(own, casts)
        with torch.no_grad():
            for target, source in zip(self._model.parameters(), own.parameters(), strict=True):
                target.copy_(source)

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Sample one answer per prompt; the first of ``uniforms`` gives the seed.

        Raises:
            ConfigError: The engine failed, for example because its cache leaves too little memory.
        """
        # Follows from the run's seed and the number of the first answer.
        options = build_batching_options(self._options, int(uniforms[0, 0] * 2**31), self._model.dtype)
        requests = [list(prompt) for prompt in prompts]
        if self._model.device.type == "cpu" and options.num_blocks is None and options.max_memory_percent is None:
            # transformers would fill 60 % of the machine's memory with zeros, in every iteration.
            needed = [-(-(len(prompt) + self._sampling.response_length) // options.page_size) for prompt in prompts]
            options.num_blocks = min(sum(needed), max(_MAX_BLOCKS_ON_CPU, *needed))
        start = self._model.continuous_batching_context_manager
        with ExitStack() as stack:
            try:
                manager = stack.enter_context(
                    start(generation_config=self._generation, continuous_batching_config=options)
                )
            except (MemoryError, RuntimeError, ValueError) as error:  # Of its cache, or of the attention kernel.
                raise _refuse(f"sampling cannot start: {error}") from error
            names = manager.add_requests(requests, max_new_tokens=self._sampling.response_length)
            try:
                answers = self._wait_for(manager, len(names))
            except BaseException:
                # A preempted rank does not wait for unfinished answers.
                for name in names:
                    manager.cancel_request(name)
                raise
        return join_answers([answers[name] for name in names], self._sampling)

    def _wait_for(self, manager: Any, count: int) -> dict[str, tuple[list[int], list[float]]]:
        answers: dict[str, tuple[list[int], list[float]]] = {}
        step = None
        while len(answers) < count:
            result = manager.get_result(timeout=_SECONDS_TO_WAIT)
            # The decoding thread can end by an error that is not reported by any request.
            is_lost = result is None and not manager.is_running()
            error = "its thread ended" if is_lost else getattr(result, "error", None)
            if error is not None:
                raise _refuse(f"sampling failed after {len(answers)} of {count} answers: {error}")
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens, result.logprobs
            # A counter of the decoding thread, absent before its first step.
            if getattr(manager, "current_batch", None) != step:
                step = manager.current_batch
                self._sampling.beat()
        return answers


def _refuse(found: str) -> ConfigError:
    remedy = "change its `max_memory_percent` or `num_blocks` if this is about memory"
    return ConfigError(Problem("transformers_continuous_batching_config", " ".join(found.split()), remedy))


def build_batching_options(options: Mapping[str, Any], seed: int, dtype: torch.dtype) -> ContinuousBatchingConfig:
    """Return the options of continuous batching.

    Args:
        options: ``transformers_continuous_batching_config``.
        seed: Seed of sampling.
        dtype: Type of the sampling weights.

    Raises:
        ConfigError: An option is unknown, or one that this library sets.
    """
    # By default transformers replaces sdpa by FlashAttention also in float32, in which it fails, and downloads its
    # binaries from the Hub if the package kernels is installed.
    is_flash = dtype != torch.float32 and not is_kernels_available()
    try:
        # A second value for one of the last two fields is a TypeError, too.
        given = {"auto_switch_to_flash": is_flash, **options}
        return ContinuousBatchingConfig(**given, return_logprobs=True, seed=seed)
    except TypeError as error:
        remedy = "write fields of transformers' ContinuousBatchingConfig, or delete the line"
        raise ConfigError(Problem("transformers_continuous_batching_config", str(error), remedy)) from error


MAX_GAP: Final = 1.0
"""Mean difference in nats per token above which an engine must have other weights, not only other rounding."""


def build_generator(
    config: RecipeConfig, args: TrainingArguments, sampling: Sampling, *, precision: Any, max_length: int
) -> Generator:
    """Build the engine of a run; ``generate`` by default.

    Args:
        config: Engine and model.
        args: Batch size of ``generate``, precision, device and rank.
        sampling: Length, temperature and stop tokens.
        precision: Builds the autocast context of forward passes.
        max_length: Tokens of the longest prompt with its longest answer.

    Raises:
        ConfigError: As ``ContinuousBatchingBackend``, ``connect`` and ``start``.
    """
    engine = config.engine
    if engine.use_vllm:
        # Imported here, because it imports vLLM if that is installed.
        from recipes_lib.rl.engines.vllm import connect, start

        if engine.vllm_mode == "server":
            return connect(config, args, sampling)
        return start(config, args, sampling, max_length)
    if engine.use_transformers_continuous_batching:
        options = engine.transformers_continuous_batching_config
        return ContinuousBatchingBackend(sampling, dtype=get_compute_dtype(args), options=options)
    return GenerateBackend(sampling, batch_size=args.per_device_eval_batch_size, precision=precision)


class EngineGuard:
    """Compares an engine's log-probabilities with the training graph's in every iteration, alike on all processes.

    Differences up to ``TOLERANCE`` are rounding. Above it, ``compute_importance_weights`` corrects them up to its
    bound, and a warning is logged once. Above ``MAX_GAP`` the run ends.

    Source: ``tests/rl/engines/test_engine.py``.
    """

    def __init__(
        self, generator: Generator, objective: PolicyObjective, dtype: torch.dtype, say: Callable[[str], None]
    ) -> None:
        """Start before the first iteration.

        Args:
            generator: Engine that samples.
            objective: Policy objective, for whether importance weights are used.
            dtype: Compute dtype.
            say: Prints a line for the user.
        """
        self._generator, self._objective, self._dtype, self._say = generator, objective, dtype, say
        self._has_reported = self._has_warned = False

    def check(self, rollout: Rollout, *, step: int) -> None:
        """Check all answers of an iteration; the result of the first iteration is logged.

        Args:
            rollout: Answers before the updates.
            step: Number of the next optimizer step, from 1.

        Raises:
            DivergedError: The mean difference is above ``MAX_GAP``: the engine has other weights than the policy.
        """
        name, tolerance = self._generator.name, TOLERANCE[self._dtype]
        gap = float((rollout.logps - rollout.engine_logps)[rollout.mask].abs().mean())
        # A negated comparison, so that NaN fails.
        if not gap <= MAX_GAP:
            raise DivergedError(
                f"before step {step} log-probabilities of {name} and of the policy differ by {gap:.2g} nats per token, "
                f"above the limit of {MAX_GAP:g}: it does not have the policy's weights, or samples at another "
                "temperature"
            )
        line = f"{name} and the policy differ by {gap:.1e} nats per token"
        if is_large := gap > tolerance:
            negation = "" if self._objective.vllm_importance_sampling_correction else "not "
            line += f", above the rounding tolerance of {tolerance:g}: {negation}corrected by importance weights"
        if not self._has_reported:
            end = "; its answers depend on more than the seed, so a resumed run gives other weights"
            self._say(line if self._generator.follows_seed else line + end)
        elif is_large and not self._has_warned:
            self._say(f"warning: step {step}: {line}")
        self._has_reported, self._has_warned = True, self._has_warned or is_large

"""vLLM colocated with training: an engine in each process, with new policy weights in every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import TrainingArguments, set_seed

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation import Generated, Sampling, join_answers
from recipes_lib.models.inference import preserve_random_states
from recipes_lib.rl.engines.link import check_vllm, engine_errors, iterate_policy
from recipes_lib.training.layouts.launch_environment import keep_engine_in_process
from recipes_lib.training.trainers.arguments import get_compute_dtype

_MIN_BATCHED_TOKENS: Final = 4096
"""Tokens of a step of the engine, as TRL has it: vLLM sets aside memory for the activations of so many."""


class ColocatedVLLM:
    """Sampling by an engine in this process, from all of its prompts at once.

    It uses this process's random generators, which are seeded and restored: the same prompts, weights and seed give the
    same answers up to rounding. Log-probabilities are those of vLLM's kernels, after the temperature. In sleep mode the
    engine holds neither weights nor KV cache; the next ``load`` sends the weights.

    Source: the order of calls is that of ``trl.generation.VLLMGeneration`` (docs/decisions/0020-colocated-engine.md);
    ``tests/rl/engines/test_vllm_colocated.py``, and with vLLM itself ``make test-vllm``.
    """

    name = "vLLM"
    follows_seed = False
    uses_policy = False
    batch_size: int | None = None

    def __init__(self, engine: Any, sampling: Sampling, parameters: Any, *, sleeps: bool) -> None:
        """Sample with ``engine``.

        Args:
            engine: vLLM's ``LLMEngine``.
            sampling: How.
            parameters: vLLM's ``SamplingParams`` of every answer.
            sleeps: Whether the engine gives its memory back while nothing is sampled.
        """
        self._engine = engine
        self._sampling = sampling
        self._parameters = parameters
        self._sleeps = sleeps
        self._awake = {"weights", "kv_cache"}
        self._count = 0
        self._sleep()

    def load(self, policy: Any) -> None:
        """Load the weights with the adapter merged, and clear the prefix cache.

        Raises:
            ConfigError: The engine failed.
        """
        with engine_errors("taking over weights"):
            self._wake("weights")
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iterate_policy(policy)})
            self._engine.reset_prefix_cache()

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once; the first of ``uniforms`` is the seed.

        Raises:
            ConfigError: The engine failed, or cut an answer short.
        """
        with preserve_random_states():
            set_seed(int(uniforms[0, 0] * 2**31))
            answers = self._answer(prompts)
        self._sleep()
        with engine_errors("sampling answers"):
            return join_answers(answers, self._sampling)

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        engine, self._count = self._engine, self._count + 1
        # No name twice: the engine knows requests by their names.
        names = [f"{self._count}-{row}" for row in range(len(prompts))]
        with engine_errors("sampling answers"):
            self._wake("kv_cache")
            for name, prompt in zip(names, prompts, strict=True):
                engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._parameters)
        answers: dict[str, tuple[list[int], list[float]]] = {}
        while len(answers) < len(names):
            with engine_errors("sampling answers"):
                if not engine.has_unfinished_requests():
                    raise RuntimeError(f"it ended after {len(answers)} of {len(names)} answers")
                for request in engine.step():
                    if request.finished:
                        answers[request.request_id] = _read(request.outputs[0])
            try:
                self._sampling.beat()
            except BaseException:
                # A preempted rank does not wait for unfinished answers.
                engine.abort_request(names)
                raise
        return [answers[name] for name in names]

    def _wake(self, part: str) -> None:
        if part not in self._awake:
            # Memory freed by training stays in torch's allocator until its cache is emptied.
            torch.cuda.empty_cache()
            self._engine.wake_up(tags=[part])
            self._awake.add(part)

    def _sleep(self) -> None:
        if self._sleeps:
            # Level 2: weights are discarded, not kept on the host.
            self._engine.sleep(level=2)
            self._awake.clear()


def _read(answer: Any) -> tuple[list[int], list[float]]:
    """Tokens of an answer and their log-probabilities; vLLM gives a mapping per token with at least itself."""
    ids = list(answer.token_ids)
    return ids, [found[token].logprob for token, found in zip(ids, answer.logprobs, strict=True)]


def start(config: RecipeConfig, args: TrainingArguments, sampling: Sampling, max_length: int) -> ColocatedVLLM:
    """Start an engine on this process's device; every process must call.

    Args:
        config: The model, and how much of the device the engine may have.
        args: Device, precision and number of processes.
        sampling: How answers are sampled.
        max_length: Tokens of the longest prompt with its longest answer.

    Raises:
        ConfigError: vLLM is not installed, or it cannot run this model in the memory that is left.
    """
    check_vllm()
    keep_engine_in_process()
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    try:
        with preserve_random_states():
            settings = EngineArgs(
                model=str(config.model.model_name_or_path),
                revision=config.model.model_revision,
                trust_remote_code=config.model.trust_remote_code,
                skip_tokenizer_init=True,
                # Stop tokens are those of training, whatever the model's generation configuration has.
                generation_config="vllm",
                dtype=str(get_compute_dtype(args)).removeprefix("torch."),
                max_model_len=max_length,
                max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, max_length),
                gpu_memory_utilization=config.engine.vllm_gpu_memory_utilization,
                enable_sleep_mode=config.engine.vllm_enable_sleep_mode,
                # Log-probabilities at the sampling temperature, as in the training graph.
                logprobs_mode="processed_logprobs",
                # CUDA graphs need a GPU; on a CPU, compilation takes longer than it saves.
                enforce_eager=args.device.type == "cpu",
                # Training has a process group already: the single-process executor (uni) would start another one.
                distributed_executor_backend="external_launcher" if args.world_size > 1 else "uni",
                seed=args.seed,
            ).create_engine_config()
            engine = LLMEngine(settings, Executor.get_class(settings), log_stats=False)
    except Exception as error:  # vLLM raises no more specific error on a failed start.
        found = f"vLLM did not start: {' '.join(str(error).split())}"
        remedy = "lower `vllm_gpu_memory_utilization` where memory is short, or write `vllm_mode: server`"
        raise ConfigError(Problem("use_vllm", found, remedy)) from error
    parameters = SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.response_length,
        stop_token_ids=list(sampling.stop_ids),
        # The sampled token alone.
        logprobs=0,
        detokenize=False,
        # Whole answers, once, instead of a copy of each at every step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return ColocatedVLLM(engine, sampling, parameters, sleeps=config.engine.vllm_enable_sleep_mode)

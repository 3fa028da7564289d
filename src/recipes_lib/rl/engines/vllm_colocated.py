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
from recipes_lib.training.layouts.launch_environment import configure_vllm
from recipes_lib.training.trainers.arguments import get_compute_dtype

_MIN_BATCHED_TOKENS: Final = 4096
"""Default ``max_num_batched_tokens``, as in TRL: vLLM reserves activation memory for as many tokens."""


class ColocatedVLLM:
    """Sampling by a vLLM engine in this process, from all prompts of the process at once.

    vLLM draws from this process's random generators, which are seeded and restored: equal prompts, weights and seeds
    give equal answers up to rounding. Log-probabilities are those of vLLM's kernels, after the temperature. In sleep
    mode the engine holds neither weights nor KV cache; the next ``load`` sends the weights.

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
            sampling: Length, temperature and stop tokens.
            parameters: vLLM's ``SamplingParams``, the same for every answer.
            sleeps: Whether the engine frees its memory outside of sampling.
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
        """Sample one answer per prompt; the first of ``uniforms`` gives the seed.

        Raises:
            ConfigError: The engine failed, or ended an answer before a stop token and before the limit.
        """
        with preserve_random_states():
            set_seed(int(uniforms[0, 0] * 2**31))
            answers = self._answer(prompts)
        self._sleep()
        with engine_errors("sampling answers"):
            return join_answers(answers, self._sampling)

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        engine, self._count = self._engine, self._count + 1
        # Unique over all calls, because the engine identifies requests by name.
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
            # vLLM allocates outside of torch's caching allocator, which would keep the memory that training freed.
            torch.cuda.empty_cache()
            self._engine.wake_up(tags=[part])
            self._awake.add(part)

    def _sleep(self) -> None:
        if self._sleeps:
            # Level 2 discards the weights instead of copying them to the host.
            self._engine.sleep(level=2)
            self._awake.clear()


def _read(answer: Any) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities of an answer; vLLM gives a mapping from token to log-probability for each."""
    ids = list(answer.token_ids)
    return ids, [found[token].logprob for token, found in zip(ids, answer.logprobs, strict=True)]


def start(config: RecipeConfig, args: TrainingArguments, sampling: Sampling, max_length: int) -> ColocatedVLLM:
    """Start an engine on this process's device; every process must call.

    Args:
        config: Model, and the engine's share of the GPU memory.
        args: Device, precision and world size.
        sampling: Length, temperature and stop tokens.
        max_length: Tokens of the longest prompt with its longest answer.

    Raises:
        ConfigError: vLLM is not installed, does not support the model, or has too little free memory.
    """
    check_vllm()
    configure_vllm()
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
                # Ignores the model's generation_config.json, whose stop tokens and top_p differ from training's.
                generation_config="vllm",
                dtype=str(get_compute_dtype(args)).removeprefix("torch."),
                max_model_len=max_length,
                max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, max_length),
                gpu_memory_utilization=config.engine.vllm_gpu_memory_utilization,
                enable_sleep_mode=config.engine.vllm_enable_sleep_mode,
                # Log-probabilities at the sampling temperature, as in the training graph.
                logprobs_mode="processed_logprobs",
                # CUDA graphs need a GPU, and on a CPU compilation takes longer than it saves.
                enforce_eager=args.device.type == "cpu",
                # Training has a process group already; `uni` would initialise another one.
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
        # 0 more than the sampled token's own.
        logprobs=0,
        detokenize=False,
        # Each answer once it is finished, instead of a copy at every step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return ColocatedVLLM(engine, sampling, parameters, sleeps=config.engine.vllm_enable_sleep_mode)

"""vLLM as generation engine: colocated with training or as a server, with new policy weights in every iteration."""

from __future__ import annotations

import http.client
import itertools
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments, set_seed
from transformers.core_model_loading import revert_weight_conversion
from trl.generation import vllm_client

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.adapters.saved import iterate_weights
from recipes_lib.models.generation import Generated, Generator, Sampling, join_answers
from recipes_lib.models.inference import preserve_random_states, unwrap_adapter
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.layouts.fsdp import is_sharded
from recipes_lib.training.layouts.launch_environment import configure_vllm
from recipes_lib.training.trainers.arguments import get_compute_dtype

RESUME: Final = "fix the engine, and run the same command to resume from the last complete checkpoint"
_IN_LAYER: Final = re.compile(r"(\.\d+\.).*")
"""The number of a layer in the name of a weight, and the name in the layer."""
_MIN_BATCHED_TOKENS: Final = 4096
"""Default ``max_num_batched_tokens``, as in TRL: vLLM reserves activation memory for as many tokens."""


def iterate_policy(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a policy once, adapters merged; all ranks of a sharded policy must iterate to the end.

    Names and shapes are those of the checkpoint, as in ``save_pretrained``: transformers fuses some tensors on loading,
    such as those of experts. Under FSDP2, one layer is gathered at a time, in the compute dtype, so that no process
    holds the full model. Yielded tensors are then copies that a receiver may keep, because the gathered layer is freed.

    Args:
        policy: Policy, sharded or not, with or without an adapter.

    Source: ``tests/rl/engines/test_vllm.py``; of two processes ``tests/distributed/test_engines.py``.
    """
    # Layer by layer, because a tensor of the checkpoint may be made from several of the layer.
    for _, layer in itertools.groupby(_iterate_fused(policy), lambda weight: _IN_LAYER.sub(r"\1", weight[0])):
        yield from revert_weight_conversion(unwrap_adapter(policy), dict(layer)).items()


def _iterate_fused(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight as ``iterate_policy``, under its name in the model."""
    if not is_sharded(policy):
        yield from iterate_weights(policy)
        return
    for unit, names in _find_units(policy):
        # Collective: all ranks call it in the same order.
        unit.unshard()
        for name, tensor in iterate_weights(policy, names):
            yield name, tensor.clone()
        unit.reshard()


def _find_units(policy: nn.Module) -> Iterator[tuple[FSDPModule, set[str]]]:
    """Yield each FSDP2 module with the names of the parameters that it gathers, in the same order on all ranks."""
    base = unwrap_adapter(policy)
    units: dict[str, tuple[Any, set[str]]] = {
        name: (unit, set()) for name, unit in base.named_modules() if isinstance(unit, FSDPModule)
    }
    # FSDP2's root is the outermost module: with an adapter, the PEFT model around the base.
    units[""] = policy, set()
    for name, _ in base.named_parameters():
        owner = name
        # FSDP2 assigns a parameter to the nearest sharded module around it.
        while owner not in units:
            owner = owner.rpartition(".")[0]
        units[owner][1].add(name)
    yield from units.values()


@contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Convert a failure of vLLM to a ``ConfigError`` (exit code 2), because no update is lost.

    Args:
        doing: Operation for the error message, such as ``sampling answers``.

    Raises:
        ConfigError: The engine failed.
    """
    try:
        yield
    except StopPendingError:
        raise
    except Exception as error:  # Engines and clients raise no more specific error.
        raise ConfigError(Problem("use_vllm", f"vLLM failed at {doing}: {explain_failure(error)}", RESUME)) from error


def explain_failure(error: Exception) -> str:
    """Return the reason of an engine's failure in one line."""
    reason = " ".join(str(error).split())
    if isinstance(error, LookupError | TypeError):
        # TRL's client indexes the fields of a response without checking that they exist.
        kind = type(error).__name__
        return f"its answer has another form than expected ({kind}: {reason}); is its version supported?"
    return reason or type(error).__name__


def check_vllm() -> None:
    """Raise if vLLM is not installed.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if not vllm_client.is_vllm_available():
        remedy = "install it (docs/ppo.md), or write `use_transformers_continuous_batching: true`, which needs nothing"
        raise ConfigError(Problem("use_vllm", "vLLM is not installed", remedy))


class ColocatedVLLM(Generator):
    """Sampling by a vLLM engine in this process, from all prompts of the process at once.

    vLLM draws from this process's random generators, which are seeded and restored: equal prompts, weights and seeds
    give equal answers up to rounding. Log-probabilities are those of vLLM's kernels, after the temperature. In sleep
    mode the engine holds neither weights nor KV cache; the next ``load`` sends the weights.

    Source: the order of calls is that of ``trl.generation.VLLMGeneration`` (docs/decisions/0020-colocated-engine.md);
    ``tests/rl/engines/test_vllm_colocated.py``, and with vLLM itself ``make test-vllm``.
    """

    name = "vLLM"

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
        with engine_errors("sampling answers"):
            with preserve_random_states():
                set_seed(int(uniforms[0, 0] * 2**31))
                answers = self._answer(prompts)
            self._sleep()
            return join_answers(answers, self._sampling)

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        engine, names = self._engine, [str(row) for row in range(len(prompts))]
        self._wake("kv_cache")
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._parameters)
        answers: dict[str, tuple[list[int], list[float]]] = {}
        while len(answers) < len(names):
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
        if self._sleeps:
            # vLLM allocates outside of torch's caching allocator, which would keep the memory that training freed.
            torch.cuda.empty_cache()
            self._engine.wake_up(tags=[part])

    def _sleep(self) -> None:
        if self._sleeps:
            # Level 2 discards the weights instead of copying them to the host.
            self._engine.sleep(level=2)


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
    configure_vllm(tf32=bool(args.tf32))
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
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
            ).create_engine_config(UsageContext.LLM_CLASS)
            engine = LLMEngine(settings, Executor.get_class(settings), log_stats=False)
        # The finalizer of vLLM 0.32 destroys the process groups of training once it is collected, or at exit, after the
        # run has done so.
        if (finalizer := getattr(engine.engine_core, "_finalizer", None)) is not None:
            finalizer.detach()
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


REQUESTS: Final = 64
"""Largest number of concurrent HTTP requests, over which the prompts are divided, as in TRL's client."""
_POLL_SECONDS: Final = 0.5
"""Time between two polls for a stop request while the server samples, in seconds."""
_COMMAND: Final = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)


class VLLMBackend(Generator):
    """Sampling by a vLLM server; the main process sends the weights, each process its prompts.

    The server draws its own random numbers. Log-probabilities are those of its kernels, after the temperature.

    Source: ``trl.generation.vllm_client.VLLMClient``; ``tests/rl/engines/test_vllm_server.py``, with a server that
    implements the same requests.
    """

    name = "vLLM"

    def __init__(self, client: Any, sampling: Sampling, *, is_main: bool) -> None:
        """Sample with ``client``; only the main process sends weights."""
        self._client = client
        self._sampling = sampling
        self._is_main = is_main
        self._described: list[tuple[str, str, list[int]]] = []

    def load(self, policy: Any) -> None:
        """Send the weights with the adapter merged, and clear the server's prefix cache.

        Collective if the policy is sharded: all ranks gather each layer.

        Raises:
            ConfigError: The server failed.
        """
        if not (self._is_main or is_sharded(policy)):
            return
        # The server needs the list of all tensors before the first one.
        self._described = self._described or [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in iterate_policy(policy)
        ]
        if not self._is_main:
            # Take part in gathering each layer.
            for _ in iterate_policy(policy):
                pass
            return
        with engine_errors("taking over weights"):
            self._client.update_named_params(self._described, _complete_each(iterate_policy(policy)))
            self._client.reset_prefix_cache()

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Sample one answer per prompt; ``uniforms`` are not used.

        Raises:
            ConfigError: The server failed, or ended an answer before a stop token and before the limit.
        """
        rows = range(len(prompts))
        parts = [rows[start::REQUESTS] for start in range(min(REQUESTS, len(prompts)))]
        requests: dict[Future[Any], range] = {Future(): part for part in parts}
        # Daemon threads instead of a pool, whose threads would keep a process that leaves a hanging server alive.
        for request, part in requests.items():
            Thread(target=self._ask, args=([list(prompts[row]) for row in part], request), daemon=True).start()
        answers: dict[int, tuple[list[int], list[float]]] = {}
        pending = set(requests)
        with engine_errors("sampling answers"):
            while pending:
                # A preempted rank waits for none. A wait is no progress, so that the watchdog ends a stall.
                STOP.raise_if_pending()
                done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for request in done:
                    answers.update(zip(requests[request], request.result(), strict=True))
                    self._sampling.beat()
            return join_answers([answers[row] for row in rows], self._sampling)

    def _ask(self, prompts: list[list[int]], request: Future[Any]) -> None:
        try:
            output = self._client.generate(
                prompts,
                temperature=self._sampling.temperature,
                max_tokens=self._sampling.response_length,
                generation_kwargs={"stop_token_ids": list(self._sampling.stop_ids)},
            )
            # For each token a list of one: its own log-probability.
            logps = [[token[0] for token in answer] for answer in output["logprobs"]]
            request.set_result(list(zip(output["completion_ids"], logps, strict=True)))
        except Exception as error:  # Raised in the caller's thread.
            request.set_exception(error)


def _complete_each(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once it is computed, and compute the next one once it is read.

    TRL's client advances the iterator on two CUDA streams in turn, which wait neither for each other nor for the stream
    of the optimizer step.
    """
    torch.cuda.synchronize()
    for weight in weights:
        torch.cuda.synchronize()
        yield weight
        torch.cuda.synchronize()


def connect(config: RecipeConfig, args: TrainingArguments, sampling: Sampling) -> VLLMBackend:
    """Connect to the server and, on the main process, open the weight transfer.

    Raises:
        ConfigError: vLLM is not installed, the server cannot be reached, or it was started without required options.
    """
    check_vllm()
    engine, is_main = config.engine, args.process_index == 0
    try:
        _wait_for_server(str(engine.vllm_server_base_url), engine.vllm_server_timeout)
        client = vllm_client.VLLMClient(
            base_url=engine.vllm_server_base_url,
            group_port=engine.vllm_group_port,
            connection_timeout=engine.vllm_server_timeout,
        )
        mode = client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            # In the other modes log-probabilities are before the temperature, unlike those of the training graph.
            raise RuntimeError(f"the server returns {mode}, before the temperature")
        if is_main:
            client.init_communicator(device=args.device)
    except Exception as error:  # TRL's client raises no more specific error on a failed request.
        found = f"{engine.vllm_server_base_url}: {explain_failure(error)}"
        raise ConfigError(Problem("vllm_server_base_url", found, f"start it on separate GPUs: {_COMMAND}")) from error
    return VLLMBackend(client, sampling, is_main=is_main)


def _wait_for_server(url: str, seconds: float) -> None:
    """Wait until a server is up; TRL 1.16's client waits for ever if the status of ``/health`` is not 200.

    Raises:
        ConnectionError: The server is not up within ``seconds``.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10.0):
                return
        except (OSError, http.client.HTTPException) as error:  # HTTPError of a status is an OSError.
            if time.monotonic() >= end:
                raise ConnectionError(f"it can't be reached: {error}; waited for {seconds:g} seconds") from error
        time.sleep(2.0)

"""A vLLM server as generation engine: prompts by HTTP, policy weights by NCCL in every iteration."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final

from torch import Tensor
from transformers import TrainingArguments
from trl.generation import vllm_client

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation import Generated, Sampling, join_answers
from recipes_lib.rl.engines.link import check_vllm, engine_errors, explain_failure, iterate_policy
from recipes_lib.training.layouts.fsdp import is_sharded

REQUESTS: Final = 64
"""Largest number of concurrent HTTP requests, over which the prompts are divided, as in TRL's client."""
_SECONDS_TO_ANSWER: Final = 10.0
_SECONDS_TO_RETRY: Final = 2.0
_URL: Final = "vllm_server_base_url"
_COMMAND: Final = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)


class VLLMBackend:
    """Sampling by a vLLM server; the main process sends the weights, each process its prompts.

    The server draws its own random numbers. Log-probabilities are those of its kernels, after the temperature.

    Source: ``trl.generation.vllm_client.VLLMClient``; ``tests/rl/engines/test_vllm_server.py``, with a server that
    implements the same requests.
    """

    name = "vLLM"
    follows_seed = False
    uses_policy = False
    batch_size: int | None = None

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
            self._client.update_named_params(self._described, iterate_policy(policy))
            self._client.reset_prefix_cache()

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Sample one answer per prompt; ``uniforms`` are not used.

        Raises:
            ConfigError: The server failed, or ended an answer before a stop token and before the limit.
        """
        rows = range(len(prompts))
        parts = [rows[start::REQUESTS] for start in range(min(REQUESTS, len(prompts)))]
        answers: dict[int, tuple[list[int], list[float]]] = {}
        pool = ThreadPoolExecutor(max_workers=len(parts))
        try:
            waiting = {pool.submit(self._ask, [list(prompts[row]) for row in part]): part for part in parts}
            for done in as_completed(waiting):
                with engine_errors("sampling answers"):
                    answers.update(zip(waiting[done], done.result(), strict=True))
                self._sampling.beat()
        finally:
            # A preempted rank does not wait for unfinished answers; requests that were sent cannot be cancelled.
            pool.shutdown(wait=False, cancel_futures=True)
        with engine_errors("sampling answers"):
            return join_answers([answers[row] for row in rows], self._sampling)

    def _ask(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        output = self._client.generate(
            prompts,
            temperature=self._sampling.temperature,
            max_tokens=self._sampling.response_length,
            generation_kwargs={"stop_token_ids": list(self._sampling.stop_ids)},
        )
        # For each token a list of one: its own log-probability.
        logps = [[token[0] for token in answer] for answer in output["logprobs"]]
        return list(zip(output["completion_ids"], logps, strict=True))


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
        raise ConfigError(Problem(_URL, found, f"start it on separate GPUs: {_COMMAND}")) from error
    return VLLMBackend(client, sampling, is_main=is_main)


def _wait_for_server(url: str, seconds: float) -> None:
    """Wait until a server is up; TRL 1.16's client waits for ever if the status of ``/health`` is not 200.

    Raises:
        ConnectionError: The server is not up within ``seconds``.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=_SECONDS_TO_ANSWER):
                return
        except (OSError, http.client.HTTPException) as error:  # HTTPError of a status is an OSError.
            if time.monotonic() >= end:
                raise ConnectionError(f"it can't be reached: {error}; waited for {seconds:g} seconds") from error
        time.sleep(_SECONDS_TO_RETRY)

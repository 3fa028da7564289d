"""A vLLM server as generation engine: prompts by HTTP, policy weights every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final

import torch
from torch import Tensor
from trl.generation import vllm_client

from recipes_lib.config.schema import EngineConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation import Generated, Sampling, join_answers
from recipes_lib.rl.engines.link import check_vllm, iterate_policy, told
from recipes_lib.training.layouts.fsdp import is_sharded

REQUESTS: Final = 64
"""Concurrent HTTP requests, over which the prompts are divided, as in TRL's client."""
_URL: Final = "vllm_server_base_url"
_COMMAND: Final = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)


class VLLMBackend:
    """Sampling by a vLLM server; the main process sends the weights, each process its prompts.

    The server has its own random numbers. Log-probabilities are those of its kernels, after the temperature.

    Source: ``trl.generation.vllm_client.VLLMClient``; ``tests/rl/engines/test_vllm_server.py``, against a server that
    speaks its requests.
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

        All ranks of a sharded policy must call: each layer is gathered by all of them.

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
            for _ in iterate_policy(policy):
                pass
            return
        with told("use_vllm", self.name, "taking over weights"):
            self._client.update_named_params(self._described, iterate_policy(policy))
            self._client.reset_prefix_cache()

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once; ``uniforms`` are not used.

        Raises:
            ConfigError: The server failed.
            RuntimeError: As ``join_answers``.
        """
        rows = range(len(prompts))
        parts = [rows[start::REQUESTS] for start in range(min(REQUESTS, len(prompts)))]
        answers: dict[int, tuple[list[int], list[float]]] = {}
        with ThreadPoolExecutor(max_workers=len(parts)) as pool:
            waiting = {pool.submit(self._ask, [list(prompts[row]) for row in part]): part for part in parts}
            for done in as_completed(waiting):
                with told("use_vllm", self.name, "sampling answers"):
                    answers.update(zip(waiting[done], done.result(), strict=True))
                self._sampling.beat()
        return join_answers([answers[row] for row in rows], self._sampling)

    def _ask(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        output = self._client.generate(
            prompts,
            temperature=self._sampling.temperature,
            max_tokens=self._sampling.response_length,
            generation_kwargs={"stop_token_ids": list(self._sampling.stop_ids)},
        )
        # A list of one per token: its own log-probability.
        logps = [[token[0] for token in answer] for answer in output["logprobs"]]
        return list(zip(output["completion_ids"], logps, strict=True))


def connect(config: EngineConfig, sampling: Sampling, *, device: torch.device, is_main: bool) -> VLLMBackend:
    """Connect to the server and, on the main process, open the weight transfer.

    Raises:
        ConfigError: vLLM is not installed, the server cannot be reached, or it was started without what is needed.
    """
    check_vllm()
    try:
        client = vllm_client.VLLMClient(
            base_url=config.vllm_server_base_url,
            group_port=config.vllm_group_port,
            connection_timeout=config.vllm_server_timeout,
        )
        mode = client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            # Other modes return log-probabilities before the temperature.
            raise RuntimeError(f"the server says {mode} of its tokens, which is before the temperature")
        if is_main:
            client.init_communicator(device=device)
    except Exception as error:  # TRL's client raises no more specific error on a failed request.
        found = f"{config.vllm_server_base_url}: {error}"
        raise ConfigError(Problem(_URL, found, f"start it on GPUs of its own: {_COMMAND}")) from error
    return VLLMBackend(client, sampling, is_main=is_main)

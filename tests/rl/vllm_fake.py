"""Fake of vLLM's ``LLMEngine`` around a transformers model.

It has its own weights, and asserts the preconditions of vLLM: no sampling while asleep, no weight update before
``wake_up``. As a script, ``tests.distributed.sharding`` with such an engine in each process, or with a stub server in
the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.distributed import sharding
from tests.rl.vllm_stub import serving
from transformers import LlamaForCausalLM

from recipes_lib.models.generation import Sampling
from recipes_lib.rl import models
from recipes_lib.rl.engines import vllm
from recipes_lib.rl.engines.vllm import ColocatedVLLM
from recipes_lib.stopping import STOP

ASKED_AT = "ASKED_AT"
"""Environment variable: engine step at which the last process receives a stop request, once."""


class FakeEngine:
    """Samples one token of every request per step, like continuous batching.

    Attributes:
        model: Model that samples.
        calls: Names of the called methods, except ``step`` and ``add_request``.
        fails_at: Number of the step that raises; ``None`` for none.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[str] = []
        self.fails_at: int | None = None
        self.num_steps = 0
        self._asleep: set[str] = set()
        self._requests: dict[str, tuple[list[int], int, Any, list[float]]] = {}

    def sleep(self, level: int) -> None:
        assert level == 2
        assert not self._asleep
        self.calls.append("sleep")
        self._asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self._asleep, "mapping memory twice crashes vLLM"
        self.calls.append(f"wake {tags[0]}")
        self._asleep -= set(tags)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        assert "weights" not in self._asleep
        self.calls.append("reload")
        # All tensors are collected before the first is loaded, like in vLLM.
        weights = dict(kwargs["weights_iterator"])
        self.model.load_state_dict(weights, strict=False)
        assert not {name for name, _ in self.model.named_parameters()} - set(weights)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        ids = prompt["prompt_token_ids"]
        self._requests[name] = (list(ids), len(ids), parameters, [])

    def abort_request(self, names: list[str]) -> None:
        self.calls.append("abort")
        for name in names:
            self._requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @torch.no_grad()
    def step(self) -> list[Any]:
        assert not self._asleep
        self.num_steps += 1
        if str(self.num_steps) == os.environ.get(ASKED_AT) and sharding.is_last_process():
            STOP.request("SIGTERM")
            del os.environ[ASKED_AT]
        if self.num_steps == self.fails_at:
            raise RuntimeError("EngineCore encountered an issue.")
        return [self._finish(name) for name in [*self._requests] if self._advance(name)]

    def _advance(self, name: str) -> bool:
        ids, start, parameters, logps = self._requests[name]
        log_probs = (self.model(input_ids=torch.tensor([ids])).logits[0, -1] / parameters.temperature).log_softmax(0)
        ids.append(int(torch.multinomial(log_probs.exp(), 1)))
        logps.append(float(log_probs[ids[-1]]))
        return len(ids) - start == parameters.max_tokens or ids[-1] in parameters.stop_token_ids

    def _finish(self, name: str) -> Any:
        ids, start, _, logps = self._requests.pop(name)
        answer = ids[start:]
        found = [{index: SimpleNamespace(logprob=logp)} for index, logp in zip(answer, logps, strict=True)]
        output = SimpleNamespace(token_ids=answer, logprobs=found)
        return SimpleNamespace(finished=True, request_id=name, outputs=[output])


def build_fake(engine: FakeEngine, sampling: Sampling, *, sleeps: bool = False) -> ColocatedVLLM:
    """Build the backend around ``engine``, as ``start`` does around vLLM."""
    parameters = SimpleNamespace(
        temperature=sampling.temperature, max_tokens=sampling.response_length, stop_token_ids=sampling.stop_ids
    )
    return ColocatedVLLM(engine, sampling, parameters, sleeps=sleeps)


@contextlib.contextmanager
def colocated(engine: FakeEngine | None = None) -> Iterator[None]:
    """Replace the colocated engine of runs by ``engine``, or by fakes with other weights than the policy's."""
    original = vllm.start

    def start(config: Any, args: Any, sampling: Sampling, max_length: int) -> ColocatedVLLM:
        fake = engine or FakeEngine(load_other(config.model.model_name_or_path))
        return build_fake(fake, sampling, sleeps=config.engine.vllm_enable_sleep_mode)

    vllm.start = start
    try:
        yield
    finally:
        vllm.start = original


def load_other(folder: str) -> Any:
    """Load the model of a folder with negated weights."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    return model


def main() -> None:
    """Run the jobs of ``tests.distributed.sharding``; ``SERVER`` has folder and port of a server's model."""
    server = os.environ.get("SERVER", "").split()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # No process may gather the full policy.
        patch.setattr(models, "gathered", None)
        stack.enter_context(colocated())
        if server:
            port = int(server[1]) if os.environ["RANK"] == "0" else 0
            stack.enter_context(serving(load_other(server[0]), patch, port))
        sharding.main()


if __name__ == "__main__":
    main()

"""transformers' continuous batching as a generation engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation.sampling import Generated, Sampling, join_answers
from recipes_lib.models.generation.stop_tokens import build_plain_generation

KEY: Final = "transformers_continuous_batching_config"
_OWN: Final = ("return_logprobs", "seed")
_SECONDS_TO_WAIT: Final = 1.0


class ContinuousBatchingBackend:
    """Answers come from the policy's own modules over a paged cache, from all prompts of a process at once.

    Tokens are drawn from torch's generator in an order that depends on how requests meet: the same seed need not give
    the same answers twice. The cache is there while answers are sampled, and given back before they are learnt from.

    Source: transformers' ``ContinuousMixin``; its log-probabilities are those of the training graph in
    ``tests/rl/engines/test_continuous_batching.py``.
    """

    name = "continuous batching"
    follows_seed = False
    batch_size: int | None = None

    def __init__(self, sampling: Sampling, *, dtype: torch.dtype, options: Mapping[str, Any] | None) -> None:
        """Prepare to answer.

        Args:
            sampling: How.
            dtype: Of products; where the policy's weights are kept in another, a copy of them in this one answers.
            options: Of upstream's ``ContinuousBatchingConfig``.

        Raises:
            ConfigError: An option is unknown, or is not the user's to set.
        """
        self._sampling = sampling
        self._dtype = dtype
        self._options = dict(options or {})
        self._build_options(0)
        self._generation = build_plain_generation(sampling.stop_ids, sampling.pad_id, sampling.response_length)
        self._generation.update(do_sample=True, temperature=sampling.temperature, top_k=0)  # type: ignore[no-untyped-call]
        self._model: Any = None
        self._is_copy = False

    def load(self, policy: Any) -> None:
        """Take the policy itself, or bring the copy in the dtype of products to where it is now."""
        own = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        if own.dtype == self._dtype or getattr(own, "is_quantized", False):
            self._model = own
            return
        # Its thread knows nothing of this one's autocast, and the cache is kept in the dtype of the weights.
        if not self._is_copy:
            self._model, self._is_copy = copy.deepcopy(own).requires_grad_(False), True
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(self._dtype)
        with torch.no_grad():
            for mine, its in zip(self._model.parameters(), own.parameters(), strict=True):
                mine.copy_(its)

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once; the first of ``uniforms`` is the seed.

        Raises:
            RuntimeError: The engine failed.
        """
        options = self._build_options(int(uniforms[0, 0] * 2**31))
        requests = [list(prompt) for prompt in prompts]
        with self._model.continuous_batching_context_manager(
            generation_config=self._generation, continuous_batching_config=options
        ) as manager:
            names = manager.add_requests(requests, max_new_tokens=self._sampling.response_length)
            try:
                answers = self._wait_for(manager, len(names))
            except BaseException:
                # Whoever leaves does not wait for the answers that are under way.
                for name in names:
                    manager.cancel_request(name)
                raise
        return join_answers([answers[name] for name in names], self._sampling)

    def _wait_for(self, manager: Any, count: int) -> dict[str, tuple[list[int], list[float]]]:
        answers: dict[str, tuple[list[int], list[float]]] = {}
        step = None
        while len(answers) < count:
            result = manager.get_result(timeout=_SECONDS_TO_WAIT)
            if result is None and not manager.is_running():
                raise RuntimeError(f"continuous batching ended after {len(answers)} of {count} answers")
            if result is not None and result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens, result.logprobs
            # Counted by the thread that decodes, from its first step on.
            if getattr(manager, "current_batch", None) != step:
                step = manager.current_batch
                self._sampling.beat()
        return answers

    def _build_options(self, seed: int) -> ContinuousBatchingConfig:
        own = [name for name in _OWN if name in self._options]
        try:
            if own:
                raise TypeError(f"{' and '.join(own)} are not the user's to set")
            return ContinuousBatchingConfig(**self._options, return_logprobs=True, seed=seed)
        except TypeError as error:
            remedy = "write fields of transformers' ContinuousBatchingConfig, or delete the line"
            raise ConfigError(Problem(KEY, str(error), remedy)) from error

"""Answers of a policy: one protocol, and transformers' ``generate`` behind it, by which any faster engine is judged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from recipes_lib.models.generation import build_plain_generation, pad_left


@dataclass(frozen=True, slots=True)
class Generated:
    """Answers to a batch of prompts, as the engine left them.

    Attributes:
        response_ids: ``int64 (B, T)`` on the CPU; behind an answer's stop token anything may stand.
        engine_logps: Log-probability of each token by the engine, in nats and at the temperature; ``float32 (B, T)``.
    """

    response_ids: Tensor
    engine_logps: Tensor


class Generator(Protocol):
    """Samples answers. Which answer a prompt gets depends on its own uniforms alone, not on the others beside it."""

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once.

        Args:
            policy: A causal language model in evaluation mode.
            prompts: Token ids.
            uniforms: Numbers of ``[0, 1)``, ``float64 (B, response_length)``: one for each token of an answer.
        """
        ...


class GenerateBackend:
    """transformers' ``generate``: any model, any device; a batch takes as long as its longest answer.

    Source: ``GenerationMixin.generate``; its log-probabilities are those of the training graph in
    ``tests/rl/test_generation.py``.
    """

    def __init__(
        self, *, stop_ids: Sequence[int], pad_id: int, response_length: int, temperature: float, precision: Any
    ) -> None:
        """Prepare to answer.

        Args:
            stop_ids: Tokens that end an answer.
            pad_id: Fills prompts on the left and answers on the right; never told from a token by its id.
            response_length: Longest answer.
            temperature: Of sampling.
            precision: Gives the context in which products are computed.
        """
        self._config = build_plain_generation(stop_ids, pad_id, response_length)
        self._pad_id = pad_id
        self._temperature = temperature
        self._precision: Any = precision

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once, as one left-padded batch that ends with its last answer."""
        input_ids, attention_mask = pad_left(prompts, self._pad_id)
        device = next(policy.parameters()).device
        sampler = SampleByUniforms(uniforms.to(device), self._temperature)
        context: AbstractContextManager[Any] = self._precision()
        with torch.no_grad(), context:
            sequences = policy.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                generation_config=self._config,
                logits_processor=LogitsProcessorList([sampler]),
            )
        return Generated(sequences[:, input_ids.shape[1] :].cpu(), sampler.read_logps().cpu())


class SampleByUniforms(LogitsProcessor):
    """Samples exactly, by inverting the distribution at given numbers, and keeps what each token's log-probability was.

    So an answer does not depend on the batch it was sampled in, nor on the number of processes; and no logits of a
    whole answer are ever held.
    """

    def __init__(self, uniforms: Tensor, temperature: float) -> None:
        """Sample at ``uniforms``, ``float64 (B, T)``."""
        self._uniforms = uniforms
        self._temperature = temperature
        self._logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave each row its sampled token alone."""
        logps = (scores.float() / self._temperature).log_softmax(dim=-1)
        # In double precision: at the end of a large vocabulary single steps are too coarse for rare tokens.
        cumulative = logps.double().exp().cumsum(dim=-1)
        at = self._uniforms[:, len(self._logps), None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, at, right=True).clamp(max=scores.shape[-1] - 1)
        self._logps.append(logps.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def read_logps(self) -> Tensor:
        """Log-probabilities of the sampled tokens, ``float32 (B, T)``."""
        return torch.stack(self._logps, dim=1)

"""What the model answers to the same few prompts as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from evaluate import Metric
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from recipes_lib.models.devices import find_device, taking_inputs_from_anywhere
from recipes_lib.models.generation.stop_tokens import build_plain_generation, pad_left
from recipes_lib.training.evaluation.sample_prompts import Prompt
from recipes_lib.training.evaluation.training_state import preserve_training_state
from recipes_lib.training.evaluation.user_metrics import compute_metrics
from recipes_lib.training.guards.preemption import GENERATION_STEPS, stop_if_agreed
from recipes_lib.training.monitoring.metrics import MetricsWriter

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer.

    Attributes:
        prompt: As a person reads it.
        completion: What the model wrote, without special tokens.
        reference: The held-out answer, if there is one.
        stopped: True when the model ended by a stop token; False when it ran into the limit.
        num_tokens: Tokens generated, the stop token included.
    """

    prompt: str
    completion: str
    reference: str | None
    stopped: bool
    num_tokens: int


def generate_samples(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_new_tokens: int
) -> list[Sample]:
    """Answer ``prompts`` greedily, as one left-padded batch.

    Every stop token of the model's generation config and the tokenizer ends an answer; sampling settings and penalties
    of that config are not used. Where weights are sharded, all processes must call it, with the same prompts.

    Args:
        model: A causal language model, wrapped or not, in evaluation mode.
        tokenizer: Its tokenizer.
        prompts: At least one.
        max_new_tokens: Limit of an answer; the model has positions for the longest prompt and so many tokens.

    Source: transformers ``GenerationMixin.generate``; ``tests/training/evaluation/test_samples.py``.
    """
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    stop_ids = _collect_stop_ids(unwrapped.generation_config.eos_token_id, tokenizer.eos_token_id)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    input_ids, attention_mask = pad_left([prompt.input_ids for prompt in prompts], pad_id)
    device = find_device(unwrapped)
    stopping = _StopTogether(max_new_tokens)
    with taking_inputs_from_anywhere(unwrapped):
        generated = unwrapped.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=build_plain_generation(stop_ids, pad_id, max_new_tokens),
            stopping_criteria=[stopping],
        )
    stopping.finish()
    answers = generated[:, input_ids.shape[1] :].tolist()
    return [_read_answer(prompt, answer, stop_ids, tokenizer) for prompt, answer in zip(prompts, answers, strict=True)]


class GenerateSamples:
    """Answers fixed prompts, appends the answers to ``samples.jsonl``, and scores them.

    Weights, modes and random states are untouched, and the answers are the same however often they are asked for.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        writer: MetricsWriter,
        *,
        max_new_tokens: int,
        metrics: Sequence[Metric] = (),
    ) -> None:
        """Prepare to answer ``prompts``.

        Args:
            prompts: At least one; the same on every process.
            tokenizer: The model's.
            writer: Of ``samples.jsonl``.
            max_new_tokens: Limit of an answer.
            metrics: Scored on the prompts that have a reference.
        """
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._writer = writer
        self._max_new_tokens = max_new_tokens
        self._metrics = metrics
        self._is_first = True

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return ``stop_rate`` (share of answers that ended by themselves), ``mean_sample_tokens``, and the metrics.

        Raises:
            ConfigError: A metric failed or returned something else than numbers.
        """
        if self._is_first:
            # Steps that a killed process had reached before its last checkpoint are made again.
            self._writer.rewind(step - 1)
            self._is_first = False
        with preserve_training_state(model):
            samples = generate_samples(model, self._tokenizer, self._prompts, max_new_tokens=self._max_new_tokens)
        for sample in samples:
            self._writer.write({"step": step, **asdict(sample)})
        scored = [(sample.completion, sample.reference) for sample in samples if sample.reference is not None]
        return {
            "stop_rate": sum(sample.stopped for sample in samples) / len(samples),
            "mean_sample_tokens": sum(sample.num_tokens for sample in samples) / len(samples),
            **compute_metrics(self._metrics, scored),
        }


class _StopTogether(StoppingCriteria):
    """Ends no answer, but looks every few tokens whether the run is asked to stop.

    Each process looks as often as the longest answer would take, so that none waits for one that was done earlier.
    """

    def __init__(self, max_new_tokens: int) -> None:
        self._num_calls, self._num_left = 0, max_new_tokens // GENERATION_STEPS

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self._num_calls += 1
        if self._num_calls % GENERATION_STEPS == 0:
            self._num_left -= 1
            stop_if_agreed()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def finish(self) -> None:
        """Look as often as is left."""
        for _ in range(self._num_left):
            stop_if_agreed()


def _collect_stop_ids(configured: int | Sequence[int] | None, eos_token_id: int | None) -> list[int]:
    ids = {eos_token_id, *(configured if isinstance(configured, Sequence) else [configured])}
    return sorted(index for index in ids if index is not None)


def _read_answer(
    prompt: Prompt, answer: list[int], stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Sample:
    end = next((at for at, index in enumerate(answer) if index in stop_ids), None)
    spoken = answer[:end]
    return Sample(
        prompt=prompt.text,
        completion=str(tokenizer.decode(spoken, skip_special_tokens=True)),
        reference=prompt.reference,
        stopped=end is not None,
        num_tokens=len(answer) if end is None else end + 1,
    )

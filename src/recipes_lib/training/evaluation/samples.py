"""Samples: the answers of a model to a few fixed prompts as training proceeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import extract_model_from_parallel
from evaluate import Metric
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation import build_plain_generation, pad_left, read_stop_ids
from recipes_lib.models.inference import find_device, inputs_moved_to_device, preserve_training_state
from recipes_lib.training.evaluation.user_metrics import compute_metrics
from recipes_lib.training.guards.preemption import GENERATION_STEPS, stop_if_agreed
from recipes_lib.training.monitoring.metrics import MetricsWriter

Example = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
"""Ids of a document, and which of them are targets, both ``(T,)``."""

_TEXT_PROMPT_TOKENS = 32

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sample continues.

    Attributes:
        input_ids: Token ids, exactly those that precede the answer in training.
        text: The prompt as a person reads it.
        reference: The held-out answer; ``None`` for prompts of the user's own.
    """

    input_ids: list[int]
    text: str
    reference: str | None


def build_prompts(
    config: EvaluationConfig,
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    positions: float,
    say: Callable[[str], None],
) -> list[Prompt]:
    """Return the prompts of a run: ``sample_prompts``, else the beginnings of the first held-out examples.

    A held-out example is cut before its first target; where everything is a target (plain text), after 32 tokens. Every
    prompt leaves room for ``sample_max_new_tokens``: an answer that positions cut short would be scored as wrong.

    Args:
        config: How many, or which.
        examples: Held-out examples in the order of the data; only as many are read as are needed.
        tokenizer: Renders the user's prompts by its chat template, where it has one.
        positions: Of the model.
        say: Is told how many held-out examples were passed over because their prompts are too long.

    Raises:
        ConfigError: Prompts of the user's own are too long.
    """
    longest = positions - config.sample_max_new_tokens
    if config.sample_prompts is not None:
        own = [_encode_own_prompt(text, tokenizer) for text in config.sample_prompts]
        problems = [
            Problem(
                "sample_prompts",
                f"{prompt.text!r:.60} has {len(prompt.input_ids):,} tokens, and with an answer of "
                f"{config.sample_max_new_tokens:,} more than the {positions:,} positions of the model",
                "shorten it, or lower sample_max_new_tokens",
            )
            for prompt in own
            if len(prompt.input_ids) > longest
        ]
        if problems:
            raise ConfigError(*problems)
        return own
    prompts: list[Prompt] = []
    num_too_long = 0
    for input_ids, loss_mask in examples if config.num_sample_prompts else ():
        answer = _find_answer(loss_mask)
        if answer.start > longest:
            num_too_long += 1
        else:
            prompts.append(_cut_example(input_ids, answer, tokenizer))
        if len(prompts) == config.num_sample_prompts:
            break
    if num_too_long:
        say(
            f"samples: {num_too_long:,} held-out prompts leave no room for sample_max_new_tokens "
            f"{config.sample_max_new_tokens:,} in the {positions:,} positions of the model: {len(prompts):,} that do "
            "are answered"
        )
    return prompts


def _encode_own_prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    if tokenizer.chat_template is None:
        return Prompt(tokenizer.encode(text), text, None)
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return Prompt(tokenizer.encode(rendered, add_special_tokens=False), text, None)


def _find_answer(loss_mask: npt.NDArray[np.bool_]) -> slice:
    is_target = loss_mask.copy()
    is_target[0] = False  # Nothing predicts the first token.
    targets = np.flatnonzero(is_target)
    start = int(targets[0]) if len(targets) else len(is_target)
    if start == 1:
        start = min(_TEXT_PROMPT_TOKENS, max(1, len(is_target) // 2))
    # The first answer alone: a chat with several turns continues with words that the model was not asked for.
    gaps = np.flatnonzero(~is_target[start:])
    return slice(start, start + int(gaps[0]) if len(gaps) else len(is_target))


def _cut_example(input_ids: npt.NDArray[np.uint32], answer: slice, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    prompt = input_ids[: answer.start]
    return Prompt(
        input_ids=prompt.tolist(),
        text=str(tokenizer.decode(prompt)),
        reference=str(tokenizer.decode(input_ids[answer], skip_special_tokens=True)),
    )


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
    stop_ids = sorted({*read_stop_ids(unwrapped), tokenizer.eos_token_id} - {None})
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    input_ids, attention_mask = pad_left([prompt.input_ids for prompt in prompts], pad_id)
    device = find_device(unwrapped)
    stopping = _StopTogether(max_new_tokens)
    with inputs_moved_to_device(unwrapped):
        generated = unwrapped.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=build_plain_generation(stop_ids, pad_id, max_new_tokens),
            stopping_criteria=[stopping],
        )
    # Rows may all have ended before the limit here and not on another rank.
    stopping.finish()
    answers = generated[:, input_ids.shape[1] :].tolist()
    return [_read_answer(prompt, answer, stop_ids, tokenizer) for prompt, answer in zip(prompts, answers, strict=True)]


@dataclass
class GenerateSamples:
    """Answers fixed prompts, appends the answers to ``samples.jsonl``, and scores them.

    Weights, modes and random states are untouched, and the answers are the same however often they are asked for.

    Attributes:
        prompts: At least one; the same on every process.
        tokenizer: The model's.
        writer: Of ``samples.jsonl``.
        max_new_tokens: Limit of an answer.
        metrics: Scored on the prompts that have a reference.
    """

    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    writer: MetricsWriter
    max_new_tokens: int
    metrics: Sequence[Metric] = ()
    _is_first: bool = field(default=True, init=False)

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return ``stop_rate`` (share of answers that ended by themselves), ``mean_sample_tokens``, and the metrics.

        Raises:
            ConfigError: A metric failed or returned something else than numbers.
        """
        if self._is_first:
            # Steps that a killed process had reached before its last checkpoint are made again.
            self.writer.rewind(step - 1)
            self._is_first = False
        with preserve_training_state(model):
            samples = generate_samples(model, self.tokenizer, self.prompts, max_new_tokens=self.max_new_tokens)
        for sample in samples:
            self.writer.write({"step": step, **asdict(sample)})
        scored = [
            (sample.prompt, sample.completion, sample.reference) for sample in samples if sample.reference is not None
        ]
        return {
            "stop_rate": sum(sample.stopped for sample in samples) / len(samples),
            "mean_sample_tokens": sum(sample.num_tokens for sample in samples) / len(samples),
            **compute_metrics(self.metrics, scored),
        }


class _StopTogether(StoppingCriteria):
    """Never ends an answer, but polls for stop requests every few tokens.

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
        """Poll for the remaining number of times."""
        for _ in range(self._num_left):
            stop_if_agreed()


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

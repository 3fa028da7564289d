"""Samples: greedy answers to a few fixed prompts, generated at every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
from recipes_lib.evaluation.answering import encode_chat
from recipes_lib.models.generation import build_plain_generation, pad_left, read_stop_ids
from recipes_lib.models.inference import find_device, inputs_moved_to_device, preserve_training_state
from recipes_lib.models.structure import reads_padding
from recipes_lib.training.evaluation.user_metrics import compute_metrics
from recipes_lib.training.guards.preemption import GENERATION_STEPS, stop_if_agreed
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.metrics import MetricsWriter

Example = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
"""Token ids of a document, and its loss mask, True at targets, both ``(T,)``."""

_TEXT_PROMPT_TOKENS = 32
"""Prompt length for plain text, in tokens."""

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a sample.

    Attributes:
        input_ids: Token ids, the same that precede the answer in training.
        text: Decoded text.
        reference: Held-out answer; ``None`` for ``sample_prompts``.
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
    system_prompt: str | None = None,
) -> list[Prompt]:
    """Return the prompts of a run: ``sample_prompts``, or else the beginnings of the first held-out examples.

    A held-out example is truncated before its first target, or, if all tokens are targets (plain text), after 32
    tokens. Every prompt leaves room for ``sample_max_new_tokens``, because metrics would score a truncated answer as
    wrong.

    Args:
        config: Evaluation keys.
        examples: Held-out examples in dataset order; read lazily.
        tokenizer: Tokenizer, whose chat template, if any, renders ``sample_prompts``.
        positions: Maximum sequence length of the model.
        say: Logger for the number of held-out examples that were skipped because their prompts are too long.
        system_prompt: System message before each of ``sample_prompts``.

    Raises:
        ConfigError: A prompt of ``sample_prompts`` is too long, or has no tokens.
        DataError: The chat template refuses such a prompt.
    """
    longest = positions - config.sample_max_new_tokens
    if config.sample_prompts is not None:
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        chats = ([*system, {"role": "user", "content": text}] for text in config.sample_prompts)
        own = [Prompt(encode_chat(tokenizer, chat), chat[-1]["content"], None) for chat in chats]
        limit = f"{config.sample_max_new_tokens:,} more than the {positions:,} positions of the model"
        problems = []
        for asked in own:
            found = f"{asked.text!r:.60} has {len(asked.input_ids):,} tokens, and with an answer of {limit}"
            if not asked.input_ids:
                # Tokenizers without a BOS token and without a chat template encode an empty text to nothing.
                problems.append(Problem("sample_prompts", f"{asked.text!r} has no tokens", "remove it"))
            elif len(asked.input_ids) > longest:
                problems.append(Problem("sample_prompts", found, "shorten it, or lower sample_max_new_tokens"))
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
            prompt, reference = input_ids[: answer.start], tokenizer.decode(input_ids[answer], skip_special_tokens=True)
            prompts.append(Prompt(prompt.tolist(), str(tokenizer.decode(prompt)), str(reference)))
        if len(prompts) == config.num_sample_prompts:
            break
    if num_too_long:
        say(
            f"samples: {num_too_long:,} held-out prompts leave no room for sample_max_new_tokens "
            f"{config.sample_max_new_tokens:,} in the {positions:,} positions of the model: {len(prompts):,} that do "
            "are answered"
        )
    return prompts


def _find_answer(loss_mask: npt.NDArray[np.bool_]) -> slice:
    is_target = loss_mask.copy()
    is_target[0] = False  # The first token has no predecessor to predict it from.
    targets = np.flatnonzero(is_target)
    start = int(targets[0]) if len(targets) else len(is_target)
    if start == 1:
        start = min(_TEXT_PROMPT_TOKENS, max(1, len(is_target) // 2))
    # The first answer only: the later turns of a chat are not part of it.
    gaps = np.flatnonzero(~is_target[start:])
    return slice(start, start + int(gaps[0]) if len(gaps) else len(is_target))


@dataclass(frozen=True, slots=True)
class Sample:
    """Generated answer, a line of ``samples.jsonl``.

    Attributes:
        prompt: Text of the prompt.
        completion: Generated text without special tokens.
        reference: Held-out answer, if there is one.
        stopped: Whether the answer ended with a stop token, before the limit.
        num_tokens: Number of generated tokens, including the stop token.
    """

    prompt: str
    completion: str
    reference: str | None
    stopped: bool
    num_tokens: int


def generate_samples(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_new_tokens: int
) -> list[Sample]:
    """Answer ``prompts`` by greedy decoding, as one left-padded batch, or one by one if the model reads padding.

    Stop tokens of the model's generation config and of the tokenizer end an answer; sampling settings and penalties of
    that config are ignored. During training every process must call, with the same number of tokens.

    Args:
        model: Causal language model, wrapped or not, in evaluation mode.
        tokenizer: Tokenizer of the model.
        prompts: Prompts, at least one.
        max_new_tokens: Maximum tokens of an answer; prompt and answer must fit the positions of the model.

    Source: transformers ``GenerationMixin.generate``; ``tests/training/evaluation/test_samples.py``.
    """
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    if len(prompts) > 1 and reads_padding(unwrapped.config.get_text_config()):
        alone = (generate_samples(model, tokenizer, [prompt], max_new_tokens=max_new_tokens) for prompt in prompts)
        return [sample for samples in alone for sample in samples]
    stop_ids = sorted({*read_stop_ids(unwrapped.generation_config), tokenizer.eos_token_id} - {None})
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
    # All rows may have ended early on this rank but not on another: make the remaining collective calls.
    stopping.finish()
    # (B, T + new tokens); rows that stopped early are padded.
    answers = generated[:, input_ids.shape[1] :].tolist()
    return [_read_answer(prompt, answer, stop_ids, tokenizer) for prompt, answer in zip(prompts, answers, strict=True)]


@dataclass
class GenerateSamples:
    """Evaluation hook that answers fixed prompts, appends the answers to ``samples.jsonl``, and scores them.

    Weights, modes and random states are preserved. Decoding is greedy, so answers are reproducible.

    Attributes:
        prompts: Prompts, at least one, the same on every process.
        tokenizer: Tokenizer of the model.
        writer: Writer of ``samples.jsonl``.
        max_new_tokens: Maximum tokens of an answer.
        metrics: Metrics, computed on the answers with a reference.
    """

    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    writer: MetricsWriter
    max_new_tokens: int
    metrics: Sequence[Metric] = ()

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return ``stop_rate`` (fraction of answers with a stop token), ``mean_sample_tokens``, and the metrics.

        Raises:
            ConfigError: A metric raised, or returned other values than numbers.
        """
        # Drop the lines of steps that a killed process made after the checkpoint, or that were rolled back.
        self.writer.rewind(step, is_evaluated=False)
        with preserve_training_state(model):
            samples = generate_samples(model, self.tokenizer, self.prompts, max_new_tokens=self.max_new_tokens)
        for sample in samples:
            self.writer.write({"step": step, **asdict(sample)})
        scored = [
            (sample.prompt, sample.completion, sample.reference) for sample in samples if sample.reference is not None
        ]
        # A metric, such as a judge behind an endpoint, cannot report progress.
        with WATCHDOG.during("computing metrics"):
            metrics = compute_metrics(self.metrics, scored)
        return {
            "stop_rate": sum(sample.stopped for sample in samples) / len(samples),
            "mean_sample_tokens": sum(sample.num_tokens for sample in samples) / len(samples),
            **metrics,
        }


class _StopTogether(StoppingCriteria):
    """Stopping criterion that never stops, but polls for stop requests every ``GENERATION_STEPS`` tokens.

    Every process polls as often as an answer of maximum length needs, so that the collective calls match.
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
    return Sample(
        prompt=prompt.text,
        completion=str(tokenizer.decode(answer[:end], skip_special_tokens=True)),
        reference=prompt.reference,
        stopped=end is not None,
        num_tokens=len(answer) if end is None else end + 1,
    )

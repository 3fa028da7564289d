"""The fixed prompts that samples answer: the user's own, or those of the first held-out examples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import EvaluationConfig

Example = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
"""Ids of a document, and which of them are targets, both ``(T,)``."""

_TEXT_PROMPT_TOKENS = 32


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
    config: EvaluationConfig, examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the prompts of a run: ``sample_prompts``, else the beginnings of the first held-out examples.

    A held-out example is cut before its first target; where everything is a target (plain text), after 32 tokens.

    Args:
        config: How many, or which.
        examples: Held-out examples in the order of the data; only the first ones are read.
        tokenizer: Renders the user's prompts by its chat template, where it has one.
    """
    if config.sample_prompts is not None:
        return [_encode_own_prompt(text, tokenizer) for text in config.sample_prompts]
    prompts = (_cut_example(input_ids, loss_mask, tokenizer) for input_ids, loss_mask in examples)
    return list(itertools.islice(prompts, config.num_sample_prompts))


def _encode_own_prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    if tokenizer.chat_template is None:
        return Prompt(tokenizer.encode(text), text, None)
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return Prompt(tokenizer.encode(rendered, add_special_tokens=False), text, None)


def _cut_example(
    input_ids: npt.NDArray[np.uint32], loss_mask: npt.NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> Prompt:
    is_target = loss_mask.copy()
    is_target[0] = False
    targets = np.flatnonzero(is_target)
    start = int(targets[0]) if len(targets) else len(input_ids)
    if start == 1:
        start = min(_TEXT_PROMPT_TOKENS, max(1, len(input_ids) // 2))
    # The first answer alone: a chat with several turns goes on with words that the model was not asked for.
    gaps = np.flatnonzero(~is_target[start:])
    end = start + int(gaps[0]) if len(gaps) else len(input_ids)
    return Prompt(
        input_ids=input_ids[:start].tolist(),
        text=str(tokenizer.decode(input_ids[:start])),
        reference=str(tokenizer.decode(input_ids[start:end], skip_special_tokens=True)),
    )

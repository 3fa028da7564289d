"""The fixed prompts that samples answer: the user's own, or those of the first held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError, Problem

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
    is_target[0] = False
    targets = np.flatnonzero(is_target)
    start = int(targets[0]) if len(targets) else len(is_target)
    if start == 1:
        start = min(_TEXT_PROMPT_TOKENS, max(1, len(is_target) // 2))
    # The first answer alone: a chat with several turns goes on with words that the model was not asked for.
    gaps = np.flatnonzero(~is_target[start:])
    return slice(start, start + int(gaps[0]) if len(gaps) else len(is_target))


def _cut_example(input_ids: npt.NDArray[np.uint32], answer: slice, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    prompt = input_ids[: answer.start]
    return Prompt(
        input_ids=prompt.tolist(),
        text=str(tokenizer.decode(prompt)),
        reference=str(tokenizer.decode(input_ids[answer], skip_special_tokens=True)),
    )

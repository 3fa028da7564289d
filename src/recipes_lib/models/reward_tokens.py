"""Answers as the tokens that a reward model reads: in its own chat template, up to the one token that ends them.

An answer that was broken off has no such token, and is read as far as it goes.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from jinja2 import Environment, Template
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from recipes_lib.errors import ConfigError, DataError, Problem

Message = Mapping[str, Any]
"""A chat turn: ``role`` and ``content``, and whatever else the template reads."""

Answer = Sequence[Message] | tuple[str, str]
"""A chat that ends with the assistant's turn, or a plain prompt and its answer."""

_TEMPLATE_DATE: Final = datetime.datetime(2025, 1, 1)
"""What ``strftime_now`` reads, as in training: an answer's score does not depend on the day."""

_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[Answer],
    *,
    finished: Sequence[bool] | None = None,
    where: Sequence[str] = (),
) -> list[list[int]]:
    """Token ids of each answer behind its prompt; the last one ends the answer, and none follows it.

    Chats are rendered by the tokenizer's template, and end where training ends them: with the last ``{% generation %}``
    block where there are such marks, otherwise with the special token that closes the last turn. A turn left open is
    ended by ``eos_token``, as plain answers are. An end token that the text already had is not doubled.

    Args:
        tokenizer: Of the reward model.
        answers: What is scored.
        finished: False where an answer was broken off: its last token is then the last one of its text, as in the pairs
            of ``UnfinishedAnswers``. Unset, all have ended.
        where: The place of each, for errors; without, its number.

    Raises:
        ConfigError: There are chats, and the tokenizer has no chat template.
        DataError: Answers that the template refuses, or chats that do not end with the assistant's turn; all of them.

    Source: equality with what training reads in ``tests/models/test_reward_tokens.py``.
    """
    if tokenizer.chat_template is None and not all(_is_plain(answer) for answer in answers):
        remedy = "score (prompt, answer) texts, or save the tokenizer with the template that it was trained with"
        raise ConfigError(Problem("chat_template_path", "the reward model's tokenizer has no chat template", remedy))
    problems: list[Problem] = []
    texts: list[str] = []
    ended = [True] * len(answers) if finished is None else finished
    for index, (answer, has_ended) in enumerate(zip(answers, ended, strict=True)):
        try:
            texts.append("".join(answer) if _is_plain(answer) else _render(tokenizer, answer, finished=has_ended))
        except Exception as error:  # Foreign code met the user's data: whatever it raises is about this answer.
            problems.append(Problem(name_answer(index, where), f"cannot be rendered: {error}"))
    if problems:
        raise DataError(*problems)
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    begin = _find_begin(tokenizer)
    for answer, ids, has_ended in zip(answers, encoded, ended, strict=True):
        if _is_plain(answer) and ids[:1] != begin:
            ids[:0] = begin
        if not has_ended:
            continue
        if _is_plain(answer):
            ids.append(tokenizer.eos_token_id)
        while ids[-2:-1] == ids[-1:]:
            ids.pop()
    return encoded


def name_answer(index: int, where: Sequence[str] = ()) -> str:
    """An answer as an error names it: by its place among ``where``, or by its number."""
    return where[index] if where else f"answer {index}"


def _is_plain(answer: Answer) -> TypeGuard[tuple[str, str]]:
    return isinstance(answer[0], str)


def _render(tokenizer: PreTrainedTokenizerBase, answer: Answer, *, finished: bool) -> str:
    """The chat as text, up to its end token, or up to where it was broken off.

    Raises:
        ValueError: The last message is not the assistant's.
    """
    chat = [_canonical(message) for message in answer if not isinstance(message, str)]
    if chat[-1]["role"] != "assistant":
        raise ValueError(f"the last message is of the role {chat[-1]['role']!r}, and what is scored is the assistant's")
    template = _compile(tokenizer.get_chat_template())
    render: Callable[..., tuple[str, list[tuple[int, int]]]] = _render_with_assistant_indices
    text, marked = render(template, chat, None, None, False, **tokenizer.special_tokens_map)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if marked:  # The template itself says where the answer ends.
        text = text[: marked[-1][1]]
    elif text.rstrip().endswith(tuple(special)):
        text = text.rstrip()
    else:
        text += str(tokenizer.eos_token)
    if finished:
        return text
    # An end of the turn, and perhaps one of the text, with line breaks between and behind them: none was written.
    end = f"(?:{'|'.join(map(re.escape, special))})"
    return re.sub(rf"{end}(?:\s*{end})*\s*\Z", "", text)


@functools.cache
def _compile(source: str) -> Template:
    """The template as ``apply_chat_template`` has it, with its clock stopped."""
    environment: Environment = _compile_jinja_template(source).environment
    return environment.from_string(source, globals={"strftime_now": _TEMPLATE_DATE.strftime})


def _canonical(message: Message) -> dict[str, Any]:
    """A message as the template reads it in training: no keys without a value, reasoning under each of its names."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _find_begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every plain text: its start token, or nothing."""
    begin: list[int] = tokenizer("a")["input_ids"][:1]
    return begin if begin == [tokenizer.bos_token_id] else []

"""What the demo's chats are made into for the stages after fine-tuning: brief answers, pairs of answers, questions."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from recipes_lib.demo.chats import Chat, Question

MAX_CHATS = 3000
"""About as many as these stages come to see in their few steps."""


def shorten(chats: Iterable[Chat]) -> Iterator[Chat]:
    """Yield the chats that a word or two can answer, asked to be brief."""
    for chat in chats:
        if chat.question.brief and (said := re.match(chat.question.brief, chat.answer)):
            yield Chat(chat.question, f"Briefly: {chat.prompt}", f"{said[1].capitalize()}.")


def ask(chat: Chat) -> dict[str, Any]:
    """As a row of prompts: the question, and in a column of its own what is right to answer."""
    return {"prompt": [{"role": "user", "content": chat.prompt}], "solution": chat.answer}


def build_pairs(chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
    """Yield ``preference`` rows, in the order of the chats: a right answer and a wrong one to each prompt.

    Two chats that ask alike and have different answers lend each other theirs. So each answer is rejected as often as
    it is chosen, and nothing but the prompt tells which is right. What finds no partner is left out.
    """
    waiting: defaultdict[Question, deque[int]] = defaultdict(deque)
    lenders: dict[int, int] = {}
    for number, chat in enumerate(chats):
        alone = waiting[chat.question]  # All of them have the same answer: they would have met otherwise.
        if alone and chats[alone[0]].answer != chat.answer:
            other = alone.popleft()
            lenders |= {number: other, other: number}
        else:
            alone.append(number)
    for number in sorted(lenders):
        chosen, rejected = chats[number], chats[lenders[number]]
        yield {
            "prompt": [{"role": "user", "content": chosen.prompt}],
            "chosen": [{"role": "assistant", "content": chosen.answer}],
            "rejected": [{"role": "assistant", "content": rejected.answer}],
        }

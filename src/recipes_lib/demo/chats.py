"""The demo's questions and answers: every answer is derived from the library's sources, none is written by hand."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from recipes_lib.demo.corpus import Definition, Module

MAX_HELD_OUT_CHATS = 250
_MAX_SIGNATURE = 80
_ANSWER_LENGTHS = range(15, 100)
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_VERBS = frozenset(
    [
        "add",
        "append",
        "ask",
        "begin",
        "build",
        "call",
        "change",
        "check",
        "clear",
        "close",
        "compute",
        "connect",
        "convert",
        "copy",
        "count",
        "create",
        "decode",
        "delete",
        "determine",
        "disable",
        "do",
        "display",
        "draw",
        "encode",
        "enable",
        "execute",
        "extract",
        "find",
        "finish",
        "format",
        "generate",
        "get",
        "give",
        "handle",
        "initialize",
        "insert",
        "invoke",
        "is",
        "iterate",
        "list",
        "load",
        "log",
        "look",
        "make",
        "map",
        "match",
        "move",
        "open",
        "parse",
        "perform",
        "print",
        "process",
        "provide",
        "put",
        "raise",
        "read",
        "register",
        "remove",
        "rename",
        "replace",
        "report",
        "reset",
        "resolve",
        "retrieve",
        "return",
        "run",
        "search",
        "select",
        "send",
        "set",
        "setup",
        "show",
        "start",
        "stop",
        "store",
        "test",
        "update",
        "verify",
        "wait",
        "wrap",
        "write",
        "yield",
    ]
)

Chat = dict[str, list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Question:
    """A kind of question.

    Attributes:
        text: With a place for the ``def`` or ``class`` line.
        answer: ``None`` where the question makes no sense.
    """

    text: str
    answer: Callable[[Definition], str | None]


@dataclass(frozen=True, slots=True)
class Chats:
    """``messages`` rows, with no name of a definition and no first sentence in both."""

    train: list[Chat]
    held_out: list[Chat]


def build_chats(modules: Iterable[Module], seed: int) -> Chats:
    """Ask about every definition what has an answer, and about those of the held-out modules apart.

    The held-out chats ask each question in turn, so that any first few of them show every kind.
    """
    train: list[Definition] = []
    held_out: list[Definition] = []
    for module in modules:
        short = [definition for definition in module.definitions if len(definition.signature) <= _MAX_SIGNATURE]
        (held_out if module.held_out else train).extend(short)
    names = {definition.name for definition in train}
    sentences = {_read_first_sentence(definition) for definition in train}
    unseen = [d for d in held_out if d.name not in names and _read_first_sentence(d) not in sentences]
    rng = random.Random(seed)
    rng.shuffle(unseen)
    by_question = [list(_ask(question, unseen)) for question in QUESTIONS]
    chats = [chat for question in QUESTIONS for chat in _ask(question, train)]
    rng.shuffle(chats)
    in_turn = [chat for turn in zip(*by_question, strict=False) for chat in turn]
    return Chats(chats, in_turn[:MAX_HELD_OUT_CHATS])


def _ask(question: Question, definitions: Iterable[Definition]) -> Iterator[Chat]:
    """Yield each chat once: overloads and copies of a function share their ``def`` line."""
    asked = set()
    for definition in definitions:
        answer = question.answer(definition)
        prompt = question.text.format(f"`{definition.signature}`")
        if answer is not None and prompt not in asked:
            asked.add(prompt)
            yield {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def _describe(definition: Definition) -> str | None:
    sentence = _read_first_sentence(definition)
    is_special = definition.name.startswith("__")  # documented alike in every class
    return sentence if len(sentence) in _ANSWER_LENGTHS and not is_special else None


def _read_first_sentence(definition: Definition) -> str:
    paragraph = " ".join(definition.docstring.partition("\n\n")[0].split())
    sentence = _SENTENCE.match(paragraph)
    return sentence.group() if sentence else f"{paragraph}."


def _name_verb(definition: Definition) -> str | None:
    word = definition.docstring.split()[0]
    verb = word.lower()
    verb = verb.removesuffix("s") if not verb.endswith("ss") else verb
    return f"{verb.capitalize()}." if verb in _VERBS and not definition.name.startswith("__") else None


def _classify(definition: Definition) -> str:
    keyword, _, rest = definition.signature.partition(" ")
    kind = {"class": "class", "async": "coroutine"}.get(keyword, "method" if "(self" in rest else "function")
    if definition.name.startswith("__"):
        return f"It is a special {kind}."
    return f"It is a private {kind}." if definition.name.startswith("_") else f"It is a {kind}."


def _count_parameters(definition: Definition) -> str | None:
    if definition.signature.startswith("class"):
        return None
    number = definition.num_parameters
    return f"It has {_spell(number)} parameter{'' if number == 1 else 's'}."


def _count_required(definition: Definition) -> str | None:
    if definition.signature.startswith("class"):
        return None
    number = definition.num_required
    return f"No, it needs {_spell(number)}." if number else "Yes, it needs none."


def _tell_return(definition: Definition) -> str | None:
    if definition.signature.startswith("class"):
        return None
    return "Yes, it does." if definition.returns else "No, it returns nothing."


def _spell(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


QUESTIONS = (
    Question("What does {} do?", _describe),
    Question("In one word, what does {} do?", _name_verb),
    Question("What is {}?", _classify),
    Question("How many parameters has {}?", _count_parameters),
    Question("Can {} be called without arguments?", _count_required),
    Question("Does {} return a value?", _tell_return),
)

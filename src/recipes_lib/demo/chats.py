"""Chats of the demo, derived from docstrings of the standard library."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from recipes_lib.demo.corpus import Definition, Module

MAX_HELD_OUT_CHATS = 1000
_MAX_SUBJECT_BYTES = 120
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_VERBS = """add ask build call change check clear close compute connect convert copy count create decode delete
determine display draw encode execute extract find format generate get handle initialize insert invoke list load log
make match move open parse perform print process provide put raise read register remove replace report represent reset
resolve retrieve return run search select send set show start stop store test update verify wait wrap write yield"""


@dataclass(frozen=True, slots=True)
class Question:
    """A kind of question.

    Attributes:
        text: With a place for what is asked about.
        subject: What is asked about: a definition's first line, or what its documentation says.
        answer: ``None`` where the question makes no sense.
        brief: A pattern whose group is what of an answer says it all; ``None`` where that is the whole of it.
    """

    text: str
    subject: Callable[[Definition], str]
    answer: Callable[[Definition], str | None]
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """What was asked and what is right to answer."""

    question: Question
    prompt: str
    answer: str

    @property
    def row(self) -> dict[str, Any]:
        """As a row of the ``messages`` layout."""
        return {"messages": [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]}


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats apart; no definition's name and no documentation's first sentence is asked about in both lists."""

    train: list[Chat]
    held_out: list[Chat]


def build_chats(modules: Iterable[Module], seed: int) -> Chats:
    """Ask about every definition whatever has an answer, and about some of those of the held-out modules apart.

    The held-out chats ask each question in turn, so that the first few of them show every kind.
    """
    train: list[Definition] = []
    held_out: list[Definition] = []
    for module in modules:
        (held_out if module.held_out else train).extend(module.definitions)
    names = {definition.name for definition in train}
    sentences = {_read_first_sentence(definition) for definition in train}
    unseen = [d for d in held_out if d.name not in names and _read_first_sentence(d) not in sentences]
    rng = random.Random(seed)
    chats = [chat for question in QUESTIONS for chat in _ask(question, train)]
    rng.shuffle(chats)
    by_question = [list(_ask(question, unseen)) for question in QUESTIONS]
    for asked in by_question:
        rng.shuffle(asked)
    in_turn = [chat for turn in zip(*by_question, strict=False) for chat in turn]
    return Chats(chats, in_turn[:MAX_HELD_OUT_CHATS])


def _ask(question: Question, definitions: Iterable[Definition]) -> Iterator[Chat]:
    """Yield each chat once; methods of several classes share a first line, and the first one's answer counts."""
    asked = set()
    for definition in definitions:
        subject, answer = question.subject(definition), question.answer(definition)
        if answer is not None and subject not in asked and len(subject.encode()) <= _MAX_SUBJECT_BYTES:
            asked.add(subject)
            yield Chat(question, question.text.format(subject), answer)


def _read_signature(definition: Definition) -> str:
    return definition.signature


def _read_first_sentence(definition: Definition) -> str:
    paragraph = " ".join(definition.docstring.partition("\n\n")[0].split())
    sentence = _SENTENCE.match(paragraph)
    return sentence.group() if sentence else paragraph


def _tell_kind(definition: Definition) -> str:
    return f"It is {_classify(definition)}."


def _count_parameters(definition: Definition) -> str | None:
    return None if _is_class(definition) else f"It has {_spell_parameters(definition)}."


def _count_required(definition: Definition) -> str | None:
    if _is_class(definition):
        return None
    number = definition.num_required
    return f"No, it needs {_spell(number)}." if number else "Yes, it needs none."


def _describe(definition: Definition) -> str | None:
    if _is_class(definition):
        return None
    return f"{_classify(definition).capitalize()} with {_spell_parameters(definition)}."


def _tell_action(definition: Definition) -> str | None:
    action = _ACTIONS.get(definition.docstring.split()[0].lower())
    return None if action is None else f"It {action} something."


def _is_class(definition: Definition) -> bool:
    return definition.signature.startswith("class ")


def _classify(definition: Definition) -> str:
    keyword, _, rest = definition.signature.partition(" ")
    kind = {"class": "class", "async": "coroutine"}.get(keyword, "method" if "(self" in rest else "function")
    if definition.name.startswith("__"):
        return f"a special {kind}"
    return f"a private {kind}" if definition.name.startswith("_") else f"a {kind}"


def _spell_parameters(definition: Definition) -> str:
    return f"{_spell(definition.num_parameters)} parameter{'' if definition.num_parameters == 1 else 's'}"


def _spell(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _conjugate(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x")):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if verb in ("copy", "verify") else f"{verb}s"


_ACTIONS = {form: _conjugate(verb) for verb in _VERBS.split() for form in (verb, _conjugate(verb))}

QUESTIONS = (
    Question("What is `{}`?", _read_signature, _tell_kind, r"It is (.+)\."),
    Question("How many parameters does `{}` have?", _read_signature, _count_parameters, r"It has (\w+)"),
    Question("Can `{}` be called without arguments?", _read_signature, _count_required, r"(\w+)"),
    Question("Describe `{}`.", _read_signature, _describe),
    Question('What does it do? Its documentation says: "{}"', _read_first_sentence, _tell_action, r"It (\w+)"),
)
"""Kinds that even a tiny model can answer about what it never saw: their facts stand in the question, or nearly so."""

"""The demo's questions: every answer follows from the source, and what is held out is new."""

import inspect
import re

import pytest

from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.demo.chats import QUESTIONS, build_chats
from recipes_lib.demo.corpus import Module, load_modules, parse_module, standard_library

HELD_OUT, TRAINED_ON = "collections", "heapq"  # by their names, see test_corpus


@pytest.fixture(scope="module")
def chats():
    return build_chats(load_modules(standard_library()), seed=0)


def ask_about(source):
    module = parse_module("a_module", source.encode())
    assert not module.held_out
    return {chat.prompt: chat.answer for chat in build_chats([module], seed=0).train}


def test_every_chat_is_a_row_of_the_chat_layout(chats):
    for number, chat in enumerate([*chats.train[:200], *chats.held_out]):
        row_format = detect_format(chat.row, where="demo")
        assert row_format.name == "messages"
        messages = canonicalize(chat.row, row_format, "demo", number).messages
        assert [message["content"] for message in messages] == [chat.prompt, chat.answer]


def test_the_held_out_questions_are_about_what_training_never_names(chats):
    def names(side):
        found = (re.match(r".*`(?:async def|def|class) (\w+)", chat.prompt) for chat in side)
        return {match[1] for match in found if match}

    def documentation(side):
        return {chat.prompt for chat in side if "documentation says" in chat.prompt}

    assert len(chats.held_out) == 1000
    assert names(chats.held_out)
    assert not names(chats.held_out) & names(chats.train)
    assert documentation(chats.held_out)
    assert not documentation(chats.held_out) & documentation(chats.train)


def test_a_name_or_a_sentence_that_training_has_is_not_held_out():
    source = b'def same(a):\n    """Return this."""\n\ndef other(a):\n    """Return that."""\n'
    held = b'def same(b):\n    """Return more."""\n\ndef new(b):\n    """Return this."""\n\n'
    held += b'def fresh(b):\n    """Get it."""\n'
    modules = [parse_module(name, text) for name, text in ((TRAINED_ON, source), (HELD_OUT, held))]
    assert [module.held_out for module in modules] == [False, True]
    asked = build_chats(modules, seed=0).held_out
    assert asked
    assert all("fresh" in chat.prompt or "Get it." in chat.prompt for chat in asked)


def test_counts_agree_with_inspect():
    source = "\n\n".join(
        f'def f{number}({parameters}):\n    """Return it."""'
        for number, parameters in enumerate(
            ["", "a", "a, b=1", "a, /, b, *, c", "*args", "a, *args, b, c=2, **kwargs", "a=1, b=2, *, c"]
        )
    )
    namespace: dict = {}
    exec(source, namespace)
    answers = ask_about(source)
    words = ["no", "one", "two", "three", "four", "five"]
    for name in [name for name in namespace if name.startswith("f")]:
        parameters = inspect.signature(namespace[name]).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = sum(p.default is p.empty and p.kind not in variadic for p in parameters)
        line = next(line for line in source.splitlines() if line.startswith(f"def {name}(")).rstrip(":")
        spelled = f"{words[len(parameters)]} parameter{'' if len(parameters) == 1 else 's'}"
        assert answers[f"How many parameters does `{line}` have?"] == f"It has {spelled}."
        needs = f"No, it needs {words[required]}." if required else "Yes, it needs none."
        assert answers[f"Can `{line}` be called without arguments?"] == needs
        assert answers[f"Describe `{line}`."] == f"A function with {spelled}."


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("def get(a)", "a function"),
        ("def _get(a)", "a private function"),
        ("def get(self)", "a method"),
        ("def __len__(self)", "a special method"),
        ("async def get(self)", "a coroutine"),
        ("class Box(Base)", "a class"),
        ("class _Box", "a private class"),
    ],
)
def test_the_kind_is_read_from_the_first_line(line, kind):
    assert ask_about(f'{line}:\n    """It."""\n')[f"What is `{line}`?"] == f"It is {kind}."


@pytest.mark.parametrize(
    ("documentation", "action"),
    [
        ("Return the size.  Or not.", "returns"),
        ("Returns the size.", "returns"),
        ("Copy it.", "copies"),
        ("Processes it.", "processes"),
        ("Search\n    for it.", "searches"),
    ],
)
def test_what_it_does_is_the_verb_of_its_documentation(documentation, action):
    answers = ask_about(f'def f():\n    """{documentation}"""\n')
    (question,) = [question for question in answers if question.startswith("What does it do?")]
    assert answers[question] == f"It {action} something."
    assert "Or not" not in question


def test_documentation_without_a_known_verb_is_not_asked_about():
    assert not any(question.startswith("What does it do?") for question in ask_about('def f():\n    """A thing."""\n'))


def test_nothing_is_longer_than_a_row_of_the_demo():
    long = 'def f(a):\n    """Return ' + "é" * 500 + '."""\n'
    assert all(len(question.encode()) < 200 for question in ask_about(long))


def test_the_first_held_out_chats_show_every_kind_of_question(chats):
    assert [chat.question for chat in chats.held_out[: len(QUESTIONS)]] == list(QUESTIONS)


def test_no_module_no_chats():
    chats = build_chats([Module("empty", "", ())], seed=0)
    assert (chats.train, chats.held_out) == ([], [])

"""Texts and chats of the demo: parsing without execution, and a split without overlap."""

from __future__ import annotations

import inspect
import re

import pytest

from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow
from recipes_lib.demo import stdlib_texts
from recipes_lib.demo.stdlib_texts import (
    LIBRARY,
    QUESTIONS,
    Module,
    build_chats,
    load_modules,
    parse_module,
    split_texts,
)
from recipes_lib.errors import DataError

SOURCE = '''"""A module."""


class Box:
    """Hold things."""

    @property
    def size(self, *, scale=1, **options):
        """Return the number of things."""
        def inner():
            return 1
        print(inner)

    async def fill(self, things, times=2):
        """Put things in."""
        yield things


def undocumented():
    return 1
'''


def test_module_is_parsed_without_execution():
    module = parse_module("boxes", (SOURCE + "raise SystemExit('must not run')\n").encode())
    assert module.docstring == "A module."
    by_name = {definition.name: definition for definition in module.definitions}
    assert set(by_name) == {"Box", "size", "fill"}
    assert by_name["size"].signature == "def size(self, *, scale=1, **options)"
    assert (by_name["size"].num_parameters, by_name["size"].num_required) == (2, 0)
    assert by_name["fill"].signature == "async def fill(self, things, times=2)"
    assert (by_name["fill"].num_parameters, by_name["fill"].num_required) == (2, 1)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"def broken(:\n", b"x = " + b"(" * 5000 + b")" * 5000, b"# coding: nonsense\n", b"\x00"]
)
def test_unparsable_module_is_skipped(data):
    assert parse_module("hostile", data) is None


def test_lone_surrogate_in_docstring_is_encodable():
    assert parse_module("odd", b'"""A lone \\ud800 half."""\n').docstring.encode()


def many_modules(tmp_path):
    for number in range(40):
        text = "".join(
            f'def f{number}_{i}(a):\n    """Return number {number} {i}."""\n    return a\n\n' for i in range(40)
        )
        (tmp_path / f"m{number}.py").write_text(f'"""Module {number}."""\n{text}')
    (tmp_path / "copy.py").write_text((tmp_path / "m0.py").read_text())
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text('"""A test."""\n')
    (tmp_path / "broken.py").write_bytes(b"def (")


def test_train_and_held_out_documents_are_disjoint(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_texts, "MIN_CHARACTERS", 1)
    many_modules(tmp_path)
    (tmp_path / "heapq.py").write_text(SOURCE)  # trained on
    (tmp_path / "collections.py").write_text(SOURCE)  # held out
    modules = load_modules(tmp_path)
    assert {module.held_out for module in modules if module.docstring == "A module."} == {True, False}
    texts = split_texts(modules, seed=0)
    assert "test.skipped" not in {module.name for module in modules}
    assert texts.held_out
    bodies = [{text.split("\n", 1)[1] for text in side} for side in (texts.train, texts.held_out)]
    assert not bodies[0] & bodies[1]
    assert split_texts(load_modules(tmp_path), seed=0) == texts


def test_library_without_sources_is_rejected(tmp_path):
    with pytest.raises(DataError, match="run the demo with a Python that includes its sources"):
        load_modules(tmp_path)


def test_definition_source_is_truncated_at_python_line_ends():
    body = "".join(f"        step_{number}()\n" for number in range(20))
    source = f'x = "\x0c \x1c \u2028"\nclass C:\n    def f(self):\n        """Do it."""\n{body}'
    (definition,) = parse_module("odd", source.encode()).definitions
    assert definition.source.startswith('def f(self):\n    """Do it."""\n    step_0()\n')
    assert definition.source.endswith("step_5()")


def test_folders_and_broken_links_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_texts, "MIN_CHARACTERS", 1)
    (tmp_path / "package.py").mkdir()
    (tmp_path / "package.py" / "inner.py").write_text('"""Inner."""\n')
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "latin.py").write_bytes(b'# -*- coding: latin-1 -*-\n"""\xe9t\xe9."""\n')
    modules = load_modules(tmp_path)
    assert [(module.name, module.docstring) for module in modules] == [
        ("latin", "été."),
        ("package.py.inner", "Inner."),
    ]


def test_split_depends_only_on_module_name():
    names = ["heapq", "collections", "json", "shutil"]
    held_out = [parse_module(name, b"").held_out for name in names]
    assert held_out == [parse_module(name, SOURCE.encode()).held_out for name in names]
    assert set(held_out) == {True, False}


HELD_OUT, TRAINED_ON = "collections", "heapq"  # Split by a hash of the name.


def ask_about(source):
    module = parse_module("a_module", source.encode())
    assert not module.held_out
    return {chat.prompt: chat.answer for chat in build_chats([module], seed=0).train}


def test_chats_have_messages_layout(chats):
    for number, chat in enumerate([*chats.train[:200], *chats.held_out]):
        entry = RawRow("demo", number, chat.row)
        row_format = detect_format(entry)
        assert row_format.name == "messages"
        messages = canonicalize(entry, row_format).messages
        assert [message["content"] for message in messages] == [chat.prompt, chat.answer]


def test_held_out_questions_name_no_training_definitions(chats):
    def names(side):
        matches = (re.match(r".*`(?:async def|def|class) (\w+)", chat.prompt) for chat in side)
        return {match[1] for match in matches if match}

    def documentation(side):
        return {chat.prompt for chat in side if "documentation says" in chat.prompt}

    assert names(chats.held_out)
    assert not names(chats.held_out) & names(chats.train)
    assert documentation(chats.held_out)
    assert not documentation(chats.held_out) & documentation(chats.train)


@pytest.mark.slow
def test_library_of_this_python_has_enough_chats():
    assert len(build_chats(load_modules(LIBRARY), seed=0).held_out) == 1000


def test_names_and_sentences_of_training_are_not_held_out():
    source = b'def same(a):\n    """Return this."""\n\ndef other(a):\n    """Return that."""\n'
    held = b'def same(b):\n    """Return more."""\n\ndef new(b):\n    """Return this."""\n\n'
    held += b'def fresh(b):\n    """Get it."""\n'
    modules = [parse_module(name, text) for name, text in ((TRAINED_ON, source), (HELD_OUT, held))]
    assert [module.held_out for module in modules] == [False, True]
    held_out_chats = build_chats(modules, seed=0).held_out
    assert held_out_chats
    assert all("fresh" in chat.prompt or "Get it." in chat.prompt for chat in held_out_chats)


def test_parameter_counts_agree_with_inspect():
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
def test_kind_is_read_from_signature(line, kind):
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
def test_action_is_verb_of_documentation(documentation, action):
    answers = ask_about(f'def f():\n    """{documentation}"""\n')
    (question,) = [question for question in answers if question.startswith("What does it do?")]
    assert answers[question] == f"It {action} something."
    assert "Or not" not in question


def test_unknown_verbs_are_skipped_and_long_documentation_is_truncated():
    assert not any(question.startswith("What does it do?") for question in ask_about('def f():\n    """A thing."""\n'))
    long = 'def f(a):\n    """Return ' + "é" * 500 + '."""\n'
    assert all(len(question.encode()) < 200 for question in ask_about(long))


def test_first_held_out_chats_cover_all_questions(chats):
    assert [chat.question for chat in chats.held_out[: len(QUESTIONS)]] == list(QUESTIONS)
    assert build_chats([Module("empty", "", ())], seed=0) == ([], [])

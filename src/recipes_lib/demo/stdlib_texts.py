"""Texts and chats of the demo, parsed from the sources of this Python's standard library; no module is imported."""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import decode_source
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from recipes_lib.errors import DataError, Problem

T = TypeVar("T")

MIN_CHARACTERS = 1_000_000
"""Text below which the demo's models do not visibly learn."""
HELD_OUT_SHARE = 0.1
"""Share of the modules that are held out from all training."""
MAX_HELD_OUT_TEXTS = 200
"""Held-out texts: enough to measure a loss, few enough to read at each evaluation."""
SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"})
"""Installed packages, and tests and applications, whose docstrings describe little of the library."""

LIBRARY = Path(sysconfig.get_path("stdlib"))
"""Folder of the standard library."""

_BODY_LINES = 6

_Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_HELD_OUT_CHATS = 1000
_MAX_SUBJECT_BYTES = 120
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_VERBS = """add ask build call change check clear close compute connect convert copy count create decode delete
determine display draw encode execute extract find format generate get handle initialize insert invoke list load log
make match move open parse perform print process provide put raise read register remove replace report represent reset
resolve retrieve return run search select send set show start stop store test update verify wait wrap write yield"""


class Definition(NamedTuple):
    """A documented function, method or class.

    Attributes:
        name: Name, without that of an enclosing class.
        signature: ``def`` or ``class`` line, without decorators and colon.
        docstring: Dedented docstring.
        source: Dedented source; that of a class ends after its docstring.
        num_parameters: Number of parameters without ``self`` and ``cls``; 0 for a class.
        num_required: Number of these parameters without a default.
    """

    name: str
    signature: str
    docstring: str
    source: str
    num_parameters: int
    num_required: int


class Module(NamedTuple):
    """A module of the library: dotted name, docstring (empty if it has none), documented definitions."""

    name: str
    docstring: str
    definitions: tuple[Definition, ...]

    @property
    def held_out(self) -> bool:
        """Whether the module is held out; depends only on its name, so that it is the same on every machine."""
        # Not ``hash``, which is seeded differently in each process.
        return hashlib.sha256(self.name.encode()).digest()[0] < HELD_OUT_SHARE * 256


class Split(NamedTuple, Generic[T]):
    """Training and held-out texts or chats, without overlap."""

    train: list[T]
    held_out: list[T]


def load_modules(root: Path) -> list[Module]:
    """Parse the modules below a folder, sorted by name; modules that do not parse are skipped.

    Raises:
        DataError: They have fewer than ``MIN_CHARACTERS`` characters of text.
    """
    modules: dict[str, Module] = {}
    for path in _iter_files(root):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if module := parse_module(name, path.read_bytes()):
            modules[name] = module
    found = sum(len(text) for module in modules.values() for _, text in _iter_texts(module))
    if found < MIN_CHARACTERS:
        text = f"has {found:,} characters of documented sources, fewer than {MIN_CHARACTERS:,}"
        remedy = "run the demo with a Python that includes its sources: python.org, uv, conda, Linux distributions"
        raise DataError(Problem(str(root), text, remedy))
    return [modules[name] for name in sorted(modules)]


def split_texts(modules: Sequence[Module], seed: int) -> Split[str]:
    """Return the documents without duplicates; held-out documents have no copy among the training documents."""
    # Keyed by the text without the name of its module, since several modules have copies of one function.
    train = {body: text for module in modules if not module.held_out for body, text in _iter_texts(module)}
    held_out = {body: text for module in modules if module.held_out for body, text in _iter_texts(module)}
    unseen = [text for body, text in held_out.items() if body not in train]
    return Split(list(train.values()), random.Random(seed).sample(unseen, min(len(unseen), MAX_HELD_OUT_TEXTS)))


def _iter_texts(module: Module) -> Iterator[tuple[str, str]]:
    """Yield each document with and without the name of its module."""
    for body in filter(None, (module.docstring, *(definition.source for definition in module.definitions))):
        yield body, f"# {module.name}\n{body}\n"


def _iter_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        # ``os.walk`` reads this list again: removing a folder in place skips it.
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        paths = (Path(folder, file) for file in files)
        yield from (path for path in paths if path.suffix == ".py" and path.is_file())


def parse_module(name: str, data: bytes) -> Module | None:
    """Return the documentation in the source of a module; ``None`` if this Python cannot parse it."""
    try:
        text = decode_source(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in strings of the library.
            tree = ast.parse(text)
        # Not ``splitlines``, which also splits at form feeds: line numbers of the parser count newlines only.
        return Module(name, _read_docstring(tree), tuple(_iter_definitions(tree, text.split("\n"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # The last two: nesting beyond the parser's limits.
        return None


def _iter_definitions(tree: ast.Module, lines: list[str]) -> Iterator[Definition]:
    bodies: list[ast.Module | ast.ClassDef] = [tree]
    while bodies:
        for node in bodies.pop().body:
            if isinstance(node, ast.ClassDef):
                bodies.append(node)
            if isinstance(node, _Function | ast.ClassDef) and _read_docstring(node):
                yield _read_definition(node, lines)


def _read_definition(node: _Function | ast.ClassDef, lines: list[str]) -> Definition:
    # Without body and decorators, ``unparse`` returns the `def` line, joined if the source breaks it.
    header = copy.copy(node)
    header.body, header.decorator_list = [], []
    num_parameters, num_required = (0, 0) if isinstance(node, ast.ClassDef) else _count_parameters(node.args)
    return Definition(
        name=node.name,
        signature=ast.unparse(header).rstrip(":"),
        docstring=_read_docstring(node),
        source=textwrap.dedent("\n".join(lines[node.lineno - 1 : _find_end(node)])),
        num_parameters=num_parameters,
        num_required=num_required,
    )


def _find_end(node: _Function | ast.ClassDef) -> int | None:
    """Return the last line of a document: that of the docstring, for a function a few lines of its body later."""
    documented = node.body[0].end_lineno
    if isinstance(node, ast.ClassDef) or documented is None or node.end_lineno is None:
        return documented
    return min(node.end_lineno, documented + _BODY_LINES)


def _read_docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
    # An escape such as "\ud800" is a lone surrogate, which UTF-8 cannot encode.
    return (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()


def _count_parameters(arguments: ast.arguments) -> tuple[int, int]:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults) + arguments.kw_defaults.count(None)
    num_parameters = len(positional) + len(arguments.kwonlyargs)
    num_parameters += (arguments.vararg is not None) + (arguments.kwarg is not None)
    is_bound = bool(positional) and positional[0].arg in ("self", "cls")
    return num_parameters - is_bound, num_required - is_bound


class QuestionTemplate(NamedTuple):
    """A kind of question about definitions.

    Attributes:
        text: Format string of the question, with one field for the subject.
        subject: Returns the subject of a definition, such as its signature; ``None`` if the question does not apply.
        answer: Returns the right answer; ``None`` if it is unknown.
        brief: Regular expression whose group is the short form of an answer; ``None`` if there is none.
    """

    text: str
    subject: Callable[[Definition], str | None]
    answer: Callable[[Definition], str | None]
    brief: str | None = None


class Chat(NamedTuple):
    """A question and its right answer."""

    question: QuestionTemplate
    prompt: str
    answer: str

    @property
    def row(self) -> dict[str, Any]:
        """Return the row in the ``messages`` layout."""
        return {"messages": [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]}


def build_chats(modules: Iterable[Module], seed: int) -> Split[Chat]:
    """Build chats about all documented definitions; those of held-out modules are held out.

    No name of a definition and no first sentence of a docstring occurs in both lists. Held-out chats cycle through the
    kinds of questions, so that the first few include every kind.
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
    # ``zip`` stops at the kind with the fewest chats, so that all kinds are equally frequent.
    in_turn = [chat for turn in zip(*by_question, strict=False) for chat in turn]
    return Split(chats, in_turn[:MAX_HELD_OUT_CHATS])


def _ask(question: QuestionTemplate, definitions: Iterable[Definition]) -> Iterator[Chat]:
    """Yield one chat per subject; of several definitions with the same signature, the first."""
    asked = set()
    for definition in definitions:
        subject, answer = question.subject(definition), question.answer(definition)
        if subject and answer and subject not in asked and len(subject.encode()) <= _MAX_SUBJECT_BYTES:
            asked.add(subject)
            yield Chat(question, question.text.format(subject), answer)


def _read_call(definition: Definition) -> str | None:
    """Return the signature of a function; ``None`` for a class."""
    return None if definition.signature.startswith("class ") else definition.signature


def _read_first_sentence(definition: Definition) -> str:
    paragraph = " ".join(definition.docstring.partition("\n\n")[0].split())
    sentence = _SENTENCE.match(paragraph)
    return sentence.group() if sentence else paragraph


def _answer_kind(definition: Definition) -> str:
    return f"It is {_classify(definition)}."


def _answer_parameters(definition: Definition) -> str:
    return f"It has {_spell_parameters(definition)}."


def _answer_required(definition: Definition) -> str:
    return f"No, it needs {_spell(definition.num_required)}." if definition.num_required else "Yes, it needs none."


def _answer_summary(definition: Definition) -> str:
    return f"{_classify(definition).capitalize()} with {_spell_parameters(definition)}."


def _answer_action(definition: Definition) -> str | None:
    action = _ACTIONS.get(definition.docstring.split()[0].lower())
    return None if action is None else f"It {action} something."


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
    QuestionTemplate("What is `{}`?", attrgetter("signature"), _answer_kind, r"It is (.+)\."),
    QuestionTemplate("How many parameters does `{}` have?", _read_call, _answer_parameters, r"It has (\w+)"),
    QuestionTemplate("Can `{}` be called without arguments?", _read_call, _answer_required, r"(\w+)"),
    QuestionTemplate("Describe `{}`.", _read_call, _answer_summary),
    QuestionTemplate(
        'What does it do? Its documentation says: "{}"', _read_first_sentence, _answer_action, r"It (\w+)"
    ),
)
"""Questions that a tiny model can answer about unseen definitions: the answers follow from the question's text."""

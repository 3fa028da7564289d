"""Corpus of the demo: the sources of the running Python's standard library, read without importing them."""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import random
import sys
import sysconfig
import textwrap
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path, PurePosixPath

from recipes_lib.errors import DataError, Problem

MIN_CHARACTERS = 1_000_000
"""A model learns nothing that a person can see from less."""
HELD_OUT_SHARE = 0.1
"""Share of the modules that nothing is trained on."""
MAX_HELD_OUT_TEXTS = 200
"""Enough to measure a loss; each evaluation reads them all."""
SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"})
"""Tests and applications, which say little about the library, and what is not the library."""

_BODY_LINES = 6

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A documented function, method or class.

    Attributes:
        name: Its own name, without the class around it.
        signature: Its ``def`` or ``class`` line, without decorators and colon.
        docstring: Dedented.
        source: Dedented; of a class, no more than the documentation.
        num_parameters: Without ``self`` and ``cls``; 0 for a class.
        num_required: Those that have no default.
    """

    name: str
    signature: str
    docstring: str
    source: str
    num_parameters: int
    num_required: int


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the library: its dotted name, its docstring (perhaps empty), its documented definitions."""

    name: str
    docstring: str
    definitions: tuple[Definition, ...]

    @property
    def held_out(self) -> bool:
        """Whether nothing of it is trained on: decided by its name alone, so the same on every machine."""
        return hashlib.sha256(self.name.encode()).digest()[0] < HELD_OUT_SHARE * 256


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents to train on and held-out ones; none is in both, whatever the module it was copied to."""

    train: list[str]
    held_out: list[str]


def standard_library() -> tuple[Path, ...]:
    """Where the running interpreter keeps its library: a folder, or the zip that an embedded Python has instead."""
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return (Path(sysconfig.get_path("stdlib")), *(Path(entry) for entry in sys.path if Path(entry).name == zipped))


def load_modules(roots: Iterable[Path]) -> list[Module]:
    """Parse every module under folders and zip files, sorted by name; what is no Python of this version is left out.

    Raises:
        DataError: There are fewer than ``MIN_CHARACTERS`` of text.
    """
    roots = tuple(roots)
    modules: dict[str, Module] = {}
    for root in roots:
        for path, data in _iter_files(root):
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            if name not in modules and (module := parse_module(name, data)):
                modules[name] = module
    found = sum(len(text) for module in modules.values() for _, text in _iter_texts(module))
    if found < MIN_CHARACTERS:
        raise DataError(
            Problem(
                " and ".join(map(str, roots)),
                f"the sources of the standard library hold {found} characters of documented code, "
                f"fewer than {MIN_CHARACTERS}",
                "run the demo with a Python that came with its sources, as those of python.org, uv, conda and the "
                "Linux distributions do",
            )
        )
    return [modules[name] for name in sorted(modules)]


def split_texts(modules: Sequence[Module], seed: int) -> Texts:
    """Return every document once, and some of those of the held-out modules apart."""
    train = {body: text for module in modules if not module.held_out for body, text in _iter_texts(module)}
    held_out = {body: text for module in modules if module.held_out for body, text in _iter_texts(module)}
    unseen = [text for body, text in held_out.items() if body not in train]
    return Texts(list(train.values()), random.Random(seed).sample(unseen, min(len(unseen), MAX_HELD_OUT_TEXTS)))


def _iter_texts(module: Module) -> Iterator[tuple[str, str]]:
    """Yield each document without and with the name of the module above it."""
    for body in filter(None, (module.docstring, *(definition.source for definition in module.definitions))):
        yield body, f"# {module.name}\n{body}\n"


def _iter_files(root: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    if zipfile.is_zipfile(root):
        with zipfile.ZipFile(root) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.suffix == ".py" and not SKIPPED_FOLDERS.intersection(path.parts):
                    yield path, archive.read(name)
        return
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        for file in files:
            file_path = Path(folder, file)
            if file_path.suffix == ".py" and file_path.is_file():
                yield PurePosixPath(file_path.relative_to(root).as_posix()), file_path.read_bytes()


def parse_module(name: str, data: bytes) -> Module | None:
    """Return what the source of a module documents; ``None`` where this Python cannot read it."""
    try:
        text = decode_source(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # How the library escapes its strings is not the user's affair.
            tree = ast.parse(text)
        return Module(name, _read_docstring(tree), tuple(_iter_definitions(tree, text.split("\n"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # The last two: nested beyond the parser's limits.
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
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [], []
    num_parameters, num_required = (0, 0) if isinstance(node, ast.ClassDef) else _count_parameters(node.args)
    return Definition(
        name=node.name,
        signature=ast.unparse(bare).rstrip(":"),
        docstring=_read_docstring(node),
        source=textwrap.dedent("\n".join(lines[node.lineno - 1 : _find_end(node)])),
        num_parameters=num_parameters,
        num_required=num_required,
    )


def _find_end(node: _Function | ast.ClassDef) -> int | None:
    """Return the last line of the documentation, and of a function the first lines of its body."""
    documented = node.body[0].end_lineno
    if isinstance(node, ast.ClassDef) or documented is None or node.end_lineno is None:
        return documented
    return min(node.end_lineno, documented + _BODY_LINES)


def _read_docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
    # Escapes may spell a lone surrogate, which no file can hold.
    return (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()


def _count_parameters(arguments: ast.arguments) -> tuple[int, int]:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults) + arguments.kw_defaults.count(None)
    num_parameters = len(positional) + len(arguments.kwonlyargs)
    num_parameters += (arguments.vararg is not None) + (arguments.kwarg is not None)
    is_bound = bool(positional) and positional[0].arg in ("self", "cls")
    return num_parameters - is_bound, num_required - is_bound

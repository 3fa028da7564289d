"""The demo's texts: what the sources of the running Python's standard library say, read without importing anything."""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import sys
import sysconfig
import textwrap
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path, PurePosixPath

from recipes_lib.errors import DataError, Problem

MIN_CHARACTERS = 1_000_000
"""Less text than this teaches nothing that a person can see."""
HELD_OUT_SHARE = 0.1
"""Share of the top-level modules that nothing is trained on."""
SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo"})
"""Tests and applications: their sources say little about the library."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A documented function, method or class.

    Attributes:
        module: Dotted name of its module.
        name: Its own name, without the class around it.
        signature: Its ``def`` or ``class`` line, without body or decorators.
        parameters: Names in the order of the signature, without stars, ``self`` and ``cls``.
        docstring: Dedented.
        source: Dedented, with the docstring.
    """

    module: str
    name: str
    signature: str
    parameters: tuple[str, ...]
    docstring: str
    source: str


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the library that could be parsed."""

    name: str
    docstring: str
    definitions: tuple[Definition, ...]

    @property
    def held_out(self) -> bool:
        """Whether nothing of this module's top-level package is trained on; the same on every machine."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return digest[0] < HELD_OUT_SHARE * 256

    @property
    def texts(self) -> Iterator[str]:
        """Its documents: what it is for, then each definition."""
        if self.docstring:
            yield f"# {self.name}\n{self.docstring}\n"
        for definition in self.definitions:
            yield f"# {self.name}\n{definition.source}\n"


def standard_library() -> tuple[Path, ...]:
    """Where the running interpreter keeps its library: a folder, or the zip that an embedded Python has instead."""
    zipped = (Path(entry) for entry in sys.path if Path(entry).name == f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    return (Path(sysconfig.get_path("stdlib")), *zipped)


def load_modules(roots: Iterable[Path]) -> list[Module]:
    """Every module under the folders and zip files, by name; files that Python itself could not read are skipped."""
    modules: dict[str, Module] = {}
    for root in roots:
        for path, data in _iter_files(root):
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            module = parse_module(name, data)
            if module is not None:
                modules.setdefault(name, module)
    return [modules[name] for name in sorted(modules)]


def _iter_files(root: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    if zipfile.is_zipfile(root):
        with zipfile.ZipFile(root) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.suffix == ".py" and not SKIPPED_FOLDERS & set(path.parts):
                    yield path, archive.read(name)
        return
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                yield PurePosixPath(path.relative_to(root).as_posix()), path.read_bytes()


def parse_module(name: str, data: bytes) -> Module | None:
    """The module's documentation, or ``None`` where the bytes are no Python of this version."""
    try:
        text = decode_source(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the library's affair
            tree = ast.parse(text)
        definitions = tuple(_iter_definitions(name, text.split("\n"), tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: the parser's own nesting limit
        return None
    return Module(name, _docstring(tree), definitions)


def _iter_definitions(module: str, lines: list[str], tree: ast.Module) -> Iterator[Definition]:
    bodies: list[ast.Module | ast.ClassDef] = [tree]
    while bodies:
        for node in bodies.pop().body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(node, ast.ClassDef):
                bodies.append(node)
            if docstring := _docstring(node):
                last = node.body[0] if isinstance(node, ast.ClassDef) else node
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : last.end_lineno]))
                yield Definition(module, node.name, _signature(node), _parameters(node), docstring, source)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    docstring = ast.get_docstring(node) or ""
    return docstring.encode("utf-8", "replace").decode()  # an escaped lone surrogate is legal in Python, in no file


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [], []
    return ast.unparse(bare)


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        return ()
    given = node.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls"))

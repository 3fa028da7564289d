"""YAML documents as entries with line numbers; syntax, repeated keys and shape are checked here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from recipes_lib.errors import Problem

_MAX_DEPTH = 12
_REMEDIES = (
    ("'\\t'", "indent with spaces"),
    ("mapping values are not allowed", "put each key on a line of its own, and quote a value that contains ': '"),
    ("found undefined alias", "quote a value that begins with '*'"),
    ("expected a single document", "remove the line '---' and what follows it"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value, from the file or from a flag.

    Attributes:
        key: As written.
        node: The value.
        where: ``file:line`` of the key, or the flag.
        locate: Where a node inside the value stands.
        flag: Whether it came from the command line.
        key_node: The key in the file; ``None`` for a flag.
    """

    key: str
    node: yaml.Node
    where: str
    locate: Callable[[yaml.Node], str]
    flag: bool = False
    key_node: yaml.ScalarNode | None = None


class _RefusedError(Exception):
    """YAML that is sound, and that a recipe never needs."""

    def __init__(self, found: str, line: int) -> None:
        super().__init__(found)
        self.found, self.line = found, line


class _Loader(yaml.SafeLoader):
    """A composer of nodes that refuses aliases, deep nesting and half characters, and joins halves."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, refusing what a recipe never needs."""
        if self.check_event(yaml.AliasEvent):
            raise _RefusedError("an alias (*name) stands for the value", self._line_of_event())
        if self.depth > _MAX_DEPTH:
            raise _RefusedError(f"more than {_MAX_DEPTH} levels deep", self._line_of_event())
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            try:
                # JSON escapes what lies beyond 16 bits as two halves.
                node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError as error:
                raise _RefusedError("an escape is half a character", int(node.start_mark.line)) from error
        return node

    def _line_of_event(self) -> int:
        return int(self.peek_event().start_mark.line)  # type: ignore[no-untyped-call]


def read_text(path: Path, problems: list[Problem]) -> str | None:
    """Return the text of a file, or ``None`` with the reason added to ``problems``."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        problems.append(Problem(str(path), "there is no such file", "give the path of a recipe's YAML file"))
    except IsADirectoryError:
        problems.append(Problem(str(path), "is a folder", "give the path of a recipe's YAML file"))
    except UnicodeDecodeError as error:
        problems.append(Problem(str(path), f"is not UTF-8 text (byte {error.start})", "save the file as UTF-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(Problem(str(path), f"cannot be read: {reason}", "check the path and its permissions"))
    return None


def compose(text: str, name: str, problems: list[Problem], syntax_remedy: str = "") -> yaml.Node | None:
    """Return the root node of a YAML text, or ``None`` (an empty text included) with any reason in ``problems``.

    Args:
        text: Of a file or of a flag.
        name: For errors.
        problems: Gets the reason.
        syntax_remedy: Of every error of syntax; unless given, by the error.
    """
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line, found, remedy = text.count("\n", 0, error.position), f"the character #x{error.character:04x}", "delete it"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        found = " ".join(part for part in (error.context, error.problem) if part)
        line = mark.line if mark else 0
        remedy = syntax_remedy or next(
            (remedy for sign, remedy in _REMEDIES if sign in found), "correct the YAML syntax here"
        )
    except _RefusedError as error:
        line, found, remedy = error.line, error.found, "write the value itself"
    except (ValueError, OverflowError):
        # PyYAML converts escapes such as "\\U99999999" without looking.
        line, found, remedy = loader.get_mark().line, "an escape that is no character", "correct or quote the value"
    else:
        return node
    problems.append(Problem(f"{name}:{line + 1}", found, remedy))
    return None


def read_entries(text: str, name: str, problems: list[Problem]) -> list[Entry]:
    """Return the top-level entries of a YAML text in order, the first of each repeated key."""
    before = len(problems)
    root = compose(text, name, problems)
    if root is None and len(problems) == before:
        problems.append(Problem(f"{name}:1", "the file is empty", "write one `key: value` a line"))
    if root is None:
        return []

    def locate(node: yaml.Node) -> str:
        return f"{name}:{node.start_mark.line + 1}"

    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        problems.append(Problem(locate(root), f"the file is {found}", "write one `key: value` a line"))
        return []
    return [
        Entry(key_node.value, node, locate(key_node), locate, key_node=key_node)
        for key_node, node in unique_pairs(root, locate, problems)
    ]


def unique_pairs(
    node: yaml.MappingNode, locate: Callable[[yaml.Node], str], problems: list[Problem]
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the pairs of a mapping; keys that are no plain names, and repeated ones, are problems."""
    seen: dict[str, str] = {}
    pairs = []
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem(locate(key), "a key is a list or a mapping", "write a plain name"))
        elif key.value in seen:
            found = f"`{key.value}` is repeated; it stands at {seen[key.value]} already"
            problems.append(Problem(locate(key), found, "keep one of the two"))
        else:
            seen[key.value] = locate(key)
            pairs.append((key, value))
    return pairs

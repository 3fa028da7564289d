"""Keys of a command that is no recipe, such as ``recipes clean``: sections of a dataclass, as YAML file and flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from recipes_lib.config.loader import explain_unknown, format_help, parse_command_line
from recipes_lib.config.paths import expand_home
from recipes_lib.config.secrets import refuse_secret_value
from recipes_lib.config.table import KeyTable, load_table
from recipes_lib.config.values import INVALID, Entry, Reader, read_entries, read_text
from recipes_lib.errors import Problem

Adapt = Callable[[str, Any], Any]
"""Changes the value of a key where it stands for another, as ``~/`` does for the home folder."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the user wrote.

    Attributes:
        path: The YAML file; ``None`` when everything came from flags.
        wants_print: Whether the effective values are asked for instead of a run.
        entries: By key, flags over the file.
        values: The valid ones.
        problems: What is wrong with the others; the command adds its own.
    """

    path: Path | None
    wants_print: bool
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    problems: list[Problem]

    def where(self, key: str) -> str:
        """Return where a key stands, or would have to."""
        return self.entries[key].where if key in self.entries else str(self.path or "command line")

    def require(self, **remedies: str) -> None:
        """Add a problem for each of these keys that is missing; the values say what to write."""
        for key, remedy in remedies.items():
            if key not in self.entries:
                self.problems.append(Problem(str(self.path or "command line"), f"`{key}` is missing", remedy))


def read_given(name: str, argv: Sequence[str], adapt: Adapt) -> Given | str:
    """Read a command's arguments, ``--config F`` and ``--key value``; or return the text of ``--help``.

    Args:
        name: Of the key table.
        argv: The arguments.
        adapt: Of every valid value.
    """
    table, problems = load_table(name), list[Problem]()
    command = parse_command_line(argv, table, problems)
    if command.wants == "help":
        return format_help(table)
    entries: list[Entry] = []
    if command.config is not None:
        text = read_text(command.config, problems)
        entries = [] if text is None else read_entries(text, str(command.config), problems)
    given = {entry.key: entry for entry in [*entries, *command.entries]}
    values = {}
    for key, entry in given.items():
        if key not in table.keys:
            problems.append(explain_unknown(entry, table, set(given)))
        elif (value := _read_value(entry, table, problems)) is not INVALID:
            values[key] = adapt(key, value)
    return Given(command.config, command.wants == "print", given, values, problems)


def _read_value(entry: Entry, table: KeyTable, problems: list[Problem]) -> Any:
    if secret := refuse_secret_value(entry.where, entry.key, entry.node):
        problems.append(secret)
        return INVALID
    return Reader(entry.locate, problems).read(entry.key, entry.node, table.keys[entry.key].schema)


def expand_paths(value: Any) -> Any:
    """Return a path, or a list of them, with ``~/`` replaced by the home folder."""
    if isinstance(value, list):
        return [expand_paths(item) for item in value]
    return expand_home(value) if isinstance(value, str) else value


def format_given(sections: Mapping[str, type], config: object, given: Given) -> str:
    """Return every effective value as YAML that loads again, each with where it comes from as a comment."""
    lines = []
    for section, keys in sections.items():
        lines += ["", f"# {section}"]
        for key in get_type_hints(keys):
            origin = given.where(key) if key in given.entries else "default"
            lines.append(f"{key}: {json.dumps(getattr(config, key), ensure_ascii=False)}".ljust(60) + f"  # {origin}")
    return "\n".join(lines).strip()

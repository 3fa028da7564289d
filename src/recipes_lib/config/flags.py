"""The command line: ``--config F`` and ``--key value`` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from recipes_lib.config.document import Entry, compose
from recipes_lib.config.paths import expand_home
from recipes_lib.config.secrets import has_secret_shape
from recipes_lib.config.table import Key, KeyTable
from recipes_lib.errors import Problem


@dataclass(slots=True)
class CommandLine:
    """What the command line asks for.

    Attributes:
        config: The YAML file.
        wants: ``help`` or ``print`` when a text is asked for instead of a run.
        entries: The overrides, in order.
    """

    config: Path | None = None
    wants: Literal["", "help", "print"] = ""
    entries: list[Entry] = field(default_factory=list)


def parse_command_line(argv: Sequence[str], table: KeyTable, problems: list[Problem]) -> CommandLine:
    """Read the arguments after the script's name; what is wrong goes to ``problems``."""
    command = CommandLine()
    seen: set[str] = set()
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            command.wants = "help"
        elif not argument.startswith("--") or argument == "--":
            remedy = "write `--config FILE`" if argument.endswith((".yaml", ".yml")) else "write `--key value`"
            shown = "an argument" if has_secret_shape(argument) else argument[:60] or "''"
            problems.append(Problem(shown, "is not a flag", f"{remedy}; lists are JSON: --key '[1, 2]'"))
        else:
            name, text = _take_value(argument, arguments)
            _add(name, text, command, table, seen, problems)
    return command


def _take_value(argument: str, arguments: list[str]) -> tuple[str, str | None]:
    name, equals, text = argument.removeprefix("--").partition("=")
    # Upstream's parser takes dashes as well.
    name = name.replace("-", "_")
    if equals:
        return name, text
    follows = arguments and not arguments[0].startswith("--") and name != "print_config"
    return name, arguments.pop(0) if follows else None


def _add(
    name: str, text: str | None, command: CommandLine, table: KeyTable, seen: set[str], problems: list[Problem]
) -> None:
    flag = f"--{name}"
    if name in seen:
        problems.append(Problem(flag, "is repeated", "keep one of the two"))
    elif name == "print_config":
        command.wants = command.wants or "print"
    elif name == "config":
        if text:
            command.config = Path(expand_home(text))
        else:
            problems.append(Problem(flag, "has no value", "write `--config FILE`"))
    else:
        node = _read_node(flag, text, table.keys.get(name), problems)
        if node is not None:
            command.entries.append(Entry(name, node, flag, lambda _: flag, flag=True))
    seen.add(name)


def _read_node(flag: str, text: str | None, key: Key | None, problems: list[Problem]) -> yaml.Node | None:
    """Return a flag's text as a node: JSON or YAML where a list or a mapping may stand, else the bare text."""
    if text is None:
        if key is not None and not key.accepts("boolean"):
            problems.append(Problem(flag, "has no value", f"write `{flag} value`"))
            return None
        text = "true"
    structured = key is not None and (key.accepts("array") or key.accepts("object"))
    if structured and text.lstrip().startswith(("[", "{")):
        found: list[Problem] = []
        node = compose(text, flag, found, "quote the JSON for the shell")
        problems.extend(Problem(flag, problem.found, problem.remedy) for problem in found)
        return node
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)

"""A command line of TRL, as its documentation prints them, in the keys and values of a recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from recipes_lib.config.values import plain_value
from recipes_lib.errors import ConfigError, Problem

_COMMAND: Final = re.compile(r"\s*(#.*\n|\$ |\w+=\S*\s)*\s*(python3?|accelerate launch|torchrun|trl|uv run)\s")

_TEXT: Final = "tag:yaml.org,2002:str"


class ShellCommand(NamedTuple):
    """What a command asks for.

    Attributes:
        script: What it runs: the name of a script or a subcommand of ``trl``.
        values: Keys and values of its flags.
        launcher: The launcher's own flags, before the script.
    """

    script: str
    values: Mapping[str, Any]
    launcher: str


def is_command(text: str) -> bool:
    """Return whether a file's text is a command instead of keys."""
    return _COMMAND.match(text) is not None


def parse_command_text(text: str, name: str) -> ShellCommand:
    """Return what the one command of a text asks for.

    Args:
        text: The command; lines may be joined by a backslash, comments are left out.
        name: For errors.

    Raises:
        ConfigError: It is not one command of a script with flags, or it reads a file besides.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(Problem(name, f"is no shell command: {error}", "close its quotes")) from None
    start = next((index for index, word in enumerate(words) if word.endswith(".py") or ".scripts." in word), None)
    if start is None:
        start = words.index("trl") + 1 if "trl" in words[:-1] else len(words)
    script, flags = words[start : start + 1], words[start + 1 :]
    if not script or any(word in ("&&", ";", "|", "python", "accelerate") for word in flags):
        raise ConfigError(Problem(name, "is not one command of a script", "write one command a file"))
    values: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            values[key] = [value] if equals else []
        elif not values:
            raise ConfigError(Problem(name, f"{word[:60]!r} is not a flag", "write `--key value`"))
        else:
            values[key].append(word.rstrip(","))
    if "config" in values:
        found = f"the command reads a file besides: {' '.join(values['config'])[:80]}"
        raise ConfigError(Problem(name, found, "migrate that file; the flags go behind `recipes check --config`"))
    last = Path(script[0]).stem if script[0].endswith(".py") else script[0].rpartition(".")[2]
    return ShellCommand(last, dict(_read_flag(*flag) for flag in values.items()), shlex.join(words[:start]))


def _read_flag(key: str, words: list[str]) -> tuple[str, Any]:
    if not words:
        # Upstream's parser makes `--no_key` of a switch that is on by default.
        return (key.removeprefix("no_"), False) if key.startswith("no_") else (key, True)
    values = [_read_word(word) for word in words]
    return key, values[0] if len(values) == 1 else values


def _read_word(word: str) -> Any:
    if word.startswith(("{", "[")):
        try:
            return yaml.safe_load(word)
        except yaml.YAMLError:
            return word
    # `no` is a value of `eval_strategy`.
    return word if word.lower() in ("yes", "no", "on", "off") else plain_value(yaml.ScalarNode(_TEXT, word))

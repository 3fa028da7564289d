"""Prompt templates in YAML files that a user can copy and edit: of judges and of ``recipes synthesize``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from recipes_lib.errors import ConfigError, Problem


def load_prompt_file(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the fields of a prompt file.

    Args:
        path: A YAML file.
        fields: The fields that it may have, and their types; those that are missing are ``None``.

    Raises:
        ConfigError: It cannot be read, is not YAML, or has other fields.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())[:300]
        raise ConfigError(Problem(str(path), f"cannot be read: {told}", "name a YAML file")) from error
    if not isinstance(found, dict):
        raise ConfigError(Problem(str(path), "is not a mapping", f"write {', '.join(fields)}"))
    problems = [
        Problem(str(path), f"unknown field `{name}`", f"the fields are {', '.join(fields)}")
        for name in found
        if name not in fields
    ]
    problems += [
        Problem(str(path), f"`{name}` is a {type(found[name]).__name__}", "see the shipped files for its form")
        for name, kind in fields.items()
        if found.get(name) is not None and not isinstance(found[name], kind)
    ]
    if problems:
        raise ConfigError(*problems)
    return {name: found.get(name) for name in fields}


def render_prompt(template: str, where: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values; values are text, whatever braces they have.

    Args:
        template: Of Jinja, without access to Python's internals.
        where: Its place, for errors.
        values: By name.

    Raises:
        ConfigError: It is no template, or names a value that does not exist.
    """
    try:
        return str(_compile(template).render(**values)).strip()
    except TemplateError as error:
        names = ", ".join(values)
        raise ConfigError(Problem(where, f"its template fails: {error}", f"the values are {names}")) from error


# A judge renders the same few templates once for each answer.
@functools.lru_cache(maxsize=256)
def _compile(template: str) -> Any:
    # StrictUndefined: a misspelt value is an error, not an empty text. Blocks leave no blank lines in a prompt.
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template)

"""Prompt templates of judges and of ``recipes synthesize``, in YAML files that a user can copy and edit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from recipes_lib.config.values import read_yaml
from recipes_lib.errors import ConfigError, Problem


def load_prompt_file(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the fields of a prompt file; missing ones are ``None``.

    Args:
        path: Path of a YAML file.
        fields: Allowed fields and their types.

    Raises:
        ConfigError: As ``read_yaml``, or it has unknown fields or fields of another type.
    """
    found = read_yaml(path)
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
    """Return a rendered template; braces in values are not interpreted.

    Args:
        template: Jinja template, rendered in a sandbox.
        where: Place of the template, for errors.
        values: Name -> value.

    Raises:
        ConfigError: The template has a syntax error, names an unknown value, or fails with these values.
    """
    try:
        return str(_compile(template).render(**values)).strip()
    except Exception as error:  # A template is a program, which can raise anything.
        names = ", ".join(values)
        raise ConfigError(Problem(where, f"its template fails: {error}", f"the values are {names}")) from error


# Cached, because a judge renders the same few templates for each answer.
@functools.lru_cache(maxsize=256)
def _compile(template: str) -> Any:
    # StrictUndefined: a misspelt value is an error, not an empty text. The block options remove lines of tags.
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template)

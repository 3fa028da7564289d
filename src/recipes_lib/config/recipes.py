"""Defaults, notes, bounds, choices and refused keys of the recipes, read from ``recipes.yaml``.

They are for the generated key tables and for errors: a sound configuration reads none of them. Every key of upstream's
configuration is either honoured or refused there; ``tests/config/test_recipes.py`` proves it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes_lib.config.schema import SECTIONS
from recipes_lib.config.table import Retired

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_defaults(recipe: str) -> Mapping[str, tuple[Any, str]]:
    """Return the defaults of a recipe that differ from upstream's: key -> (value, reason)."""
    return {key: tuple(default) for key, default in _gather("defaults", recipe).items()}


def read_choices(recipe: str) -> Mapping[str, list[str | bool]]:
    """Return the values honoured where upstream allows more."""
    return _gather("choices", recipe)


def read_added_choices(recipe: str) -> Mapping[str, list[str]]:
    """Return additional values of upstream keys."""
    return _gather("added_choices", recipe)


def read_common(recipe: str) -> list[str]:
    """Return the keys of a recipe that most users set, the recipe's own first; also of ``corpus`` and ``eval``."""
    return [key for recipes, keys in _read()["common"].items() if recipe in recipes.split() for key in keys.split()]


def read_notes() -> Mapping[str, str]:
    """Return additions to upstream's help texts."""
    notes: Mapping[str, str] = _read()["notes"]
    return notes


@functools.cache
def read_bounds() -> Mapping[str, Mapping[str, float]]:
    """Return the range of each number, as JSON schema spells it."""
    return {
        key: {bound: value for bound, value in entry.items() if bound != "keys"}
        for entry in _read()["bounds"]
        for key in entry["keys"].split()
    }


@functools.cache
def read_refused(recipe: str) -> Mapping[str, Retired]:
    """Return the keys of upstream or other recipes that this recipe refuses, with their messages."""
    return build_retired(entry for entry in _read()["refused"] if recipe in entry.get("recipes", recipe).split())


def build_retired(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Retired]:
    """Return what is known of each key that the entries of a file name; the file's comment says how they are read."""
    retired: dict[str, Retired] = {}
    for entry in entries:
        names = entry.get("keys", "").split()
        for section in entry.get("sections", "").split():
            names += [field.name for field in dataclasses.fields(SECTIONS[section])]
        retired |= dict.fromkeys(names, _build_retired(**entry))
    return retired


def _build_retired(
    found: str = "", remedy: str = "delete the line", new: str | None = None, since: str = "", **entry: Any
) -> Retired:
    if since:
        return Retired(f"was renamed to `{new}` ({since})", f"write `{new}`", new)
    values = {value: {} for value in entry["at"]} if "at" in entry else entry.get("values")
    return Retired(found, remedy, new, values)


def _gather(part: str, recipe: str) -> dict[str, Any]:
    """Return what a part of the file says of a recipe: its entries for all, then those that name it."""
    return {
        key: value
        for names, keys in _read()[part].items()
        if {"all", recipe} & set(names.split())
        for key, value in keys.items()
    }


@functools.cache
def _read() -> Mapping[str, Any]:
    return read_lists(Path(__file__).with_name("recipes.yaml"))


def read_lists(path: Path) -> Mapping[str, Any]:
    """Return what a file of this package lists."""
    lists: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    return lists

"""Defaults, notes, bounds, choices, refused and renamed keys of the recipes, read from YAML files.

They are for the generated key tables, for migration and for errors: a sound configuration reads none of them. Every key
of upstream's configuration is either honoured or refused in ``recipes.yaml``; ``tests/config/test_recipes.py`` proves
it. ``renames.yaml`` has upstream keys that are retired, belong to another file, or differ in meaning here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.schema import SECTIONS
from recipes_lib.config.table import RECIPE_NAMES, Retired, load_table

# libyaml reads these files twenty times as fast, where PyYAML was built with it.
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
def read_harmless() -> tuple[str, ...]:
    """Return patterns of keys that change how a run is watched or where it puts things, never what it computes."""
    return tuple(_read()["harmless"].split())


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
    """Return the keys of upstream or other recipes that this recipe refuses, with their messages; a corpus has none."""
    if recipe not in RECIPE_NAMES:
        return {}
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
        if recipe in RECIPE_NAMES and {"all", recipe} & set(names.split())
        for key, value in keys.items()
    }


@functools.cache
def _read() -> Mapping[str, Any]:
    return read_lists(Path(__file__).with_name("recipes.yaml"))


def read_lists(path: Path) -> Mapping[str, Any]:
    """Return what a file of this package lists."""
    lists: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    return lists


_NAMED: Final = re.compile(r"`(\w+)[`:]")


@dataclass(frozen=True, slots=True)
class Meaning:
    """A difference in meaning that a file does not show.

    Attributes:
        where: Affected part of the file.
        there: Previous meaning.
        here: Meaning here.
        advice: What to write for what it was, as a clause; ``None`` where there is nothing to decide.
        keys: It concerns files with one of these keys; none: all files.
        unless: It is settled where one of these is set.
        decisive: A key of the recipes that it concerns.
    """

    where: str
    there: str
    here: str
    advice: str | None = None
    keys: AbstractSet[str] = frozenset()
    unless: AbstractSet[str] = frozenset()
    decisive: str = "output_dir"

    def concerns(self, present: AbstractSet[str], known: AbstractSet[str]) -> bool:
        """Return whether a file with the keys ``present`` leaves it open to a recipe with the keys ``known``."""
        is_there = not self.keys or bool(self.keys & present)
        return self.advice is not None and self.decisive in known and is_there and not self.unless & present

    def __str__(self) -> str:
        return f"{self.where}: {self.here} here, {self.there}; {self.advice}"


@dataclass(frozen=True, slots=True)
class Renames:
    """What became of upstream's spellings.

    Attributes:
        retired: Old spelling -> its replacement.
        elsewhere: Keys that belong to another recipe, another file or another level of the file.
        values: (key, removed value) -> the value that takes its place.
        mixture: Other spellings of the keys of a ``dataset_mixture`` entry.
        meanings: Differences in meaning that migration reports.
    """

    retired: Mapping[str, Retired]
    elsewhere: Mapping[str, Retired]
    values: Mapping[tuple[str, str], str]
    mixture: Mapping[str, str]
    meanings: Sequence[Meaning]


@functools.cache
def read_renames() -> Renames:
    """Read them; only an error, a migration or the generated pages need them."""
    lists = read_lists(Path(__file__).with_name("renames.yaml"))
    return Renames(
        build_retired(lists["retired"]),
        build_retired(lists["elsewhere"]),
        {(key, old): new for key, values in lists["values"].items() for old, new in values.items()},
        lists["mixture"],
        [_build_meaning(**meaning) for meaning in lists["meanings"]],
    )


def _build_meaning(keys: str = "", unless: str = "", **texts: Any) -> Meaning:
    return Meaning(keys=frozenset(keys.split()), unless=frozenset(unless.split()), **texts)


@functools.cache
def read_known(recipe: str) -> Mapping[str, Retired]:
    """Return all retired spellings of a recipe, with their messages; a corpus has none."""
    if recipe not in RECIPE_NAMES:
        return {}
    keys, renames = load_table(recipe).keys, read_renames()
    elsewhere = {key: retired for key, retired in renames.elsewhere.items() if key not in keys}
    known = {**elsewhere, **renames.retired, **read_refused(recipe)}
    # A successor that the recipe has not says itself what to do; and no remedy names a key that is refused in turn.
    led = {key: known.get(retired.new or "", retired) for key, retired in known.items()}
    return {
        key: replace(retired, remedy="delete the line") if known.keys() & _NAMED.findall(retired.remedy) else retired
        for key, retired in led.items()
    }

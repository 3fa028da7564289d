"""Rejected and renamed keys of the recipes, read from YAML files.

Only migration and errors read them; loading a valid configuration does not. Every key of upstream's configuration
classes is either supported or rejected in ``recipes.yaml``, which ``tests/config/test_recipes.py`` verifies; the file
also has what ``tests/config/generate.py`` writes into the key tables. ``renames.yaml`` lists upstream keys that were
removed or renamed, belong to another file, or have a different meaning here.
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

from recipes_lib.config.schema import SECTIONS
from recipes_lib.config.table import RECIPE_NAMES, Retired, load_table, read_lists


@functools.cache
def read_harmless() -> tuple[str, ...]:
    """Return patterns of keys with which a run may be resumed with other values: they do not affect its weights."""
    return tuple(_read()["harmless"].split())


@functools.cache
def read_refused(recipe: str) -> Mapping[str, Retired]:
    """Return the keys of upstream or other recipes that a recipe rejects."""
    return build_retired(entry for entry in _read()["refused"] if recipe in entry.get("recipes", recipe).split())


def build_retired(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Retired]:
    """Return key -> ``Retired`` for the entries of ``recipes.yaml`` or ``renames.yaml``, whose comments define them."""
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


@functools.cache
def _read() -> Mapping[str, Any]:
    return read_lists(Path(__file__).with_name("recipes.yaml"))


_NAMED: Final = re.compile(r"`(\w+)[`:]")


@dataclass(frozen=True, slots=True)
class Meaning:
    """A key or absent key whose meaning differs from upstream's.

    Attributes:
        where: Affected part of the file.
        there: Upstream's meaning.
        here: Meaning here.
        advice: How to keep upstream's meaning, as a clause; ``None`` if there is no choice.
        keys: Names, separated by spaces: affects files with at least one of these keys; empty: all files.
        unless: Names, separated by spaces: does not affect files with one of these keys.
        decisive: Affects only recipes that have this key.
    """

    where: str
    there: str
    here: str
    advice: str | None = None
    keys: str = ""
    unless: str = ""
    decisive: str = "output_dir"

    def concerns(self, present: AbstractSet[str], known: AbstractSet[str]) -> bool:
        """Return whether to report it for a file with the keys ``present`` and a recipe with the keys ``known``."""
        is_affected = not self.keys or not present.isdisjoint(self.keys.split())
        is_affected = is_affected and present.isdisjoint(self.unless.split())
        return self.advice is not None and self.decisive in known and is_affected

    def __str__(self) -> str:
        return f"{self.where}: {self.here} here, {self.there}; {self.advice}"


@dataclass(frozen=True, slots=True)
class Renames:
    """Contents of ``renames.yaml``.

    Attributes:
        retired: Removed or renamed key -> its replacement.
        elsewhere: Key of another recipe, another file or another level of the file -> where it belongs.
        values: (key, removed value) -> replacement value.
        mixture: Other spelling of a key of a ``dataset_mixture`` entry -> the key.
        meanings: Differences in meaning that migration reports.
    """

    retired: Mapping[str, Retired]
    elsewhere: Mapping[str, Retired]
    values: Mapping[tuple[str, str], str]
    mixture: Mapping[str, str]
    meanings: Sequence[Meaning]


@functools.cache
def read_renames() -> Renames:
    """Load ``renames.yaml``; needed for errors, migration and the generated pages only."""
    lists = read_lists(Path(__file__).with_name("renames.yaml"))
    return Renames(
        build_retired(lists["retired"]),
        build_retired(lists["elsewhere"]),
        {(key, old): new for key, values in lists["values"].items() for old, new in values.items()},
        lists["mixture"],
        [Meaning(**meaning) for meaning in lists["meanings"]],
    )


@functools.cache
def read_known(recipe: str) -> Mapping[str, Retired]:
    """Return all rejected and renamed keys of a recipe; empty for ``corpus`` and other commands."""
    if recipe not in RECIPE_NAMES:
        return {}
    keys, renames = load_table(recipe).keys, read_renames()
    elsewhere = {key: retired for key, retired in renames.elsewhere.items() if key not in keys}
    known = {**elsewhere, **renames.retired, **read_refused(recipe)}
    # If the successor of a key is itself rejected by this recipe, report its message instead; and no remedy may name a
    # rejected key, whose own remedy is the way out.
    resolved = {key: _resolve(retired, known.get(retired.new or "")) for key, retired in known.items()}

    def find_remedy(retired: Retired) -> str:
        named = next((name for name in _NAMED.findall(retired.remedy) if name in resolved), None)
        return resolved[named].remedy if named else retired.remedy

    return {key: replace(retired, remedy=find_remedy(retired)) for key, retired in resolved.items()}


def _resolve(retired: Retired, refused: Retired | None) -> Retired:
    """Return ``refused``, which is the successor of ``retired``; at values without a successor the line is deleted."""
    if refused is None or refused.values is None:
        return refused or retired
    return replace(
        refused, values={**refused.values, **{at: {} for at, new in (retired.values or {}).items() if not new}}
    )

"""Upstream keys that are retired, belong to another file, or differ in meaning here, read from ``renames.yaml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.recipes import build_retired, read_lists, read_refused
from recipes_lib.config.table import RECIPE_NAMES, Retired, load_table

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

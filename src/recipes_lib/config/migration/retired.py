"""Retired keys: the message that refuses one, and the rewrite that migration makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Retired:
    """A spelling that is understood only to be refused.

    Attributes:
        found: Why it is not a key, as a clause that follows its name.
        remedy: What to do, in one clause.
        new: The key that takes its value over unchanged.
        values: What each value becomes when it is not taken over unchanged: new keys with their values, none of them
            when the line can go. A value that is not listed is for the user to decide.
    """

    found: str
    remedy: str
    new: str | None = None
    values: Mapping[Hashable, Mapping[str, Any]] | None = None

    def rewrite(self, value: Any) -> Mapping[str, Any] | None:
        """Return the keys that replace this one at ``value``; ``None`` when only the user can decide."""
        if self.values is not None:
            return self.values.get(value) if isinstance(value, Hashable) else None
        return {self.new: value} if self.new else {}


def renamed(new: str, since: str) -> Retired:
    """A key whose successor means the same."""
    return Retired(f"was renamed to `{new}` ({since})", f"write `{new}`", new)


def dropped(found: str, remedy: str = "delete the line") -> Retired:
    """A key that can go whatever its value."""
    return Retired(found, remedy)


def dropped_at(values: tuple[Hashable, ...], found: str, remedy: str) -> Retired:
    """A key that can go at ``values``, where it asks for nothing; at others the user decides."""
    return Retired(found, remedy, values={value: {} for value in values})


def undecided(found: str, remedy: str) -> Retired:
    """A key that no rewriting can settle."""
    return Retired(found, remedy, values={})


def each(names: str, retired: Retired) -> dict[str, Retired]:
    """The same fate for several names, separated by blanks."""
    return dict.fromkeys(names.split(), retired)

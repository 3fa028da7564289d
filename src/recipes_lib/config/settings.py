"""Values of a run during validation: user values and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes_lib.config.table import KeyTable
from recipes_lib.config.values import Entry
from recipes_lib.errors import Problem


@dataclass(frozen=True, slots=True)
class Settings:
    """User values and defaults of a run, before ``rules.DECISIONS`` are applied.

    Attributes:
        table: Keys of the recipe.
        name: File name, or ``command line``; the location of missing keys.
        given: Key -> user entry, valid or not; a flag replaces the line that it overrides.
        values: Key -> valid user value.
    """

    table: KeyTable
    name: str
    given: Mapping[str, Entry]
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Return the user value or the default of a key; ``None`` for a key that the recipe does not have."""
        if key in self.values:
            return self.values[key]
        return self.table.keys[key].default if key in self.table.keys else None

    def gives(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null."""
        return self.values.get(key) is not None

    def changes(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null and the default."""
        return self.gives(key) and self.values[key] != self.table.keys[key].default

    def broken(self, key: str) -> bool:
        """Return whether the user set ``key`` to an invalid value."""
        return key in self.given and key not in self.values

    def where(self, key: str) -> str:
        """Return the location of ``key`` in the file or flags; the file name if it is missing."""
        return self.given[key].where if key in self.given else self.name

    def problem(self, key: str, found: str, remedy: str) -> Problem:
        """Return a problem at the location of ``key``."""
        return Problem(self.where(key), found, remedy)


def is_local(reference: Any) -> bool:
    """Return whether a model or dataset reference is an existing file or folder."""
    if not isinstance(reference, str) or not reference:
        return False
    try:
        return Path(reference).exists()
    except (OSError, ValueError):  # A name that is too long, or has a null byte (ValueError on Python 3.11).
        return False

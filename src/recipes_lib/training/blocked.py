"""What one row of the table of combinations says that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes_lib.training.launch import Launch

Keys = Mapping[str, Any]
"""Keys of a recipe that are in effect; one that is absent has upstream's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A combination that would fail late, or compute something else in silence.

    Attributes:
        recipe: What the recipe says, in Markdown; empty where the launch file alone is at fault.
        launch: What the launch file says, or the launch itself, in Markdown.
        why: What would happen.
        remedy: What to do instead.
        stages: Recipes that it is about; empty: all of them.
        keys: Of the recipe; it is told at the first of them that is set. Without any it is told of the launch file.
        applies: Whether a recipe of these stages and a launch are such a combination.
    """

    recipe: str = ""
    launch: str
    why: str
    remedy: str
    stages: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    applies: Callable[[Keys, Launch], bool]

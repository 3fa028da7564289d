"""A combination of a recipe and a launch file that is refused, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import Problem
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

    def tell(self, keys: Keys, config: RecipeConfig, file: str) -> Problem:
        """Return what is wrong with a recipe that it applies to, where that stands, and what to do.

        Args:
            keys: Of the recipe.
            config: The recipe.
            file: The launch file, as it is to be called.
        """
        if not self.keys:
            asked = f"recipes/{config.stage}.py and a launch with {self.launch}" if self.stages else self.launch
            return Problem(file, f"{asked}: {self.why}", self.remedy)
        key = next((key for key in self.keys if keys.get(key)), self.keys[0])
        said = f"`{key}: {keys[key]}`" if key in keys else f"`{key}`, which is not given,"
        where = config.provenance.get(key, "default")
        found = f"{said} and a launch with {self.launch}: {self.why}"
        return Problem(key if where == "default" else where, found, self.remedy)

"""Locate recipes, configurations, pipelines and launch files: in the working directory, else in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from recipes_lib.errors import ConfigError, Problem

LAUNCH_FILES: Final = Path("accelerate_configs")
RECIPES: Final = Path("recipes")
_IN_WHEEL: Final = Path(__file__).with_name("share")
"""Copy of both folders in a wheel (see setup.py); an editable installation uses the checkout instead."""
_ROOT: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[2]


def find_shipped(path: Path) -> Path:
    """Return ``path`` if it exists, else the package's file of that name, else ``path``.

    Args:
        path: Path from the user, such as ``recipes/configs/llama3-8b/sft.yaml``.
    """
    is_ours = path.parts[:1] in ((RECIPES.name,), (LAUNCH_FILES.name,))
    return _ROOT / path if is_ours and not path.exists() and (_ROOT / path).exists() else path


def find_recipe(recipe: str) -> Path:
    """Return the absolute path of a recipe's script."""
    return find_shipped(RECIPES / f"{recipe}.py").resolve()


def find_launch_file(name: str) -> Path:
    """Return the path of a launch file.

    Args:
        name: A path that ends with ``.yaml``, ``.yml`` or ``.json``, or the stem of a file in ``accelerate_configs/``.

    Raises:
        ConfigError: The file does not exist; the message lists the available ones.
    """
    path = find_shipped(Path(name) if name.endswith((".yaml", ".yml", ".json")) else LAUNCH_FILES / f"{name}.yaml")
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in find_shipped(LAUNCH_FILES).glob("*.yaml")))
        raise ConfigError(Problem("--hardware", f"there is no launch file {path}", f"write one of {names}, or a path"))
    return path

"""Python API: ``train`` and ``check`` a recipe, ``load_run`` reads the output directory of a run."""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.loader import load_config
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.shipped import find_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from recipes_lib.config.schema import RecipeConfig
    from recipes_lib.report.run_files import RunFiles

_MAIN: Final = {"rloo": "grpo", "lora": "sft"}
"""Recipe -> the recipe whose script defines its main function."""


def train(recipe: str, config: str | Path | Mapping[str, Any] | None = None, **overrides: Any) -> RunFiles:
    """Train a recipe in this process, and return the finished run.

    Equivalent to ``python recipes/RECIPE.py --config F --key value``: an existing ``output_dir`` is resumed, and a
    finished run returns immediately. Use ``recipes launch`` to train with several processes.

    Args:
        recipe: Name of the recipe, such as ``sft``, ``dpo`` or ``grpo``.
        config: Path of a YAML file, or a mapping of keys to values.
        overrides: Keys that override those of ``config``, such as ``learning_rate=1e-5``.

    Returns:
        The run: ``path`` (the directory of the model), ``metrics`` (one mapping per logged step or evaluation, suitable
        for ``pandas.DataFrame``), ``facts`` and ``samples``.

    Raises:
        ConfigError: A key, a value or a combination of keys is invalid; lists every problem.
        DataError: The data are invalid.
        DivergedError: A guard stopped the run before a bad update.

    Source: ``tests/test_api.py``.
    """
    loaded = _load(recipe, config, overrides)
    with _importing_recipe(_MAIN.get(recipe, recipe)) as main:
        main(loaded)
    return load_run(Path(loaded.training["output_dir"]))


def check(recipe: str, config: str | Path | Mapping[str, Any] | None = None, **overrides: Any) -> list[Problem]:
    """Return every problem that ``recipes check`` finds for a run on one process; an empty list if it can train.

    Args:
        recipe: As for ``train``.
        config: As for ``train``.
        overrides: As for ``train``.
    """
    from rich.console import Console

    from recipes_lib.commands.check import check as check_run
    from recipes_lib.training.layouts.launch_environment import plan_launch

    try:
        loaded = _load(recipe, config, overrides)
    except ConfigError as error:
        return list(error.problems)
    return check_run(loaded, plan_launch(None), Console(file=io.StringIO()))


def load_run(folder: str | Path) -> RunFiles:
    """Read the output directory of a run, finished or not.

    Args:
        folder: The output directory.

    Raises:
        DataError: The folder contains no run.
    """
    from recipes_lib.report.run_files import read_run

    return read_run(Path(folder))


def _load(recipe: str, config: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> RecipeConfig:
    if recipe not in RECIPE_NAMES:
        raise ConfigError(
            Problem("recipe", f"there is no recipe {recipe!r}", f"write one of {', '.join(RECIPE_NAMES)}")
        )
    keys = {**(config if isinstance(config, Mapping) else {}), **overrides}
    argv = ["--config", str(config)] if isinstance(config, str | Path) else []
    for key, value in keys.items():
        # Only what JSON spells as YAML does is dumped: a path or a NumPy scalar would become a quoted string.
        is_json = isinstance(value, bool | int | float | list | tuple | dict | None)
        argv.append(f"--{key}={json.dumps(value, default=str) if is_json else value}")
    return load_config(recipe, argv)


@contextmanager
def _importing_recipe(recipe: str) -> Iterator[Callable[[RecipeConfig], None]]:
    """Yield the main function of a recipe's script, with the script's folder importable, as for ``python SCRIPT``."""
    path = find_recipe(recipe)
    sys.path.insert(0, str(path.parent))
    try:
        yield runpy.run_path(str(path))["main"]
    finally:
        sys.path.remove(str(path.parent))

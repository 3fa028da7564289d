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

    It is what ``python recipes/RECIPE.py --config F --key value`` does: the same directory resumes, and a run that is
    done returns at once. Several processes are started by ``recipes launch``, not from here.

    Args:
        recipe: Recipe: ``sft``, ``dpo``, ``grpo`` and others.
        config: YAML file of the recipe, or its keys.
        overrides: Keys over those of ``config``, such as ``learning_rate=1e-5``.

    Returns:
        The run: ``path``, where its model is; ``metrics``, one mapping per logged step or evaluation, as
        ``pandas.DataFrame`` takes them; ``facts``, ``samples``.

    Raises:
        ConfigError: A key or a combination of them is wrong; every problem at once.
        DataError: The data are wrong.
        DivergedError: A guard stopped the run before a bad update.

    Source: ``tests/test_api.py``.
    """
    loaded = _load(recipe, config, overrides)
    with _importing_recipe(_MAIN.get(recipe, recipe)) as main:
        main(loaded)
    return load_run(Path(loaded.training["output_dir"]))


def check(recipe: str, config: str | Path | Mapping[str, Any] | None = None, **overrides: Any) -> list[Problem]:
    """Return every problem of a run on one process, as ``recipes check`` finds them; none: it is ready to train.

    Args:
        recipe: As for ``train``.
        config: As for ``train``.
        overrides: As for ``train``.
    """
    from rich.console import Console

    from recipes_lib.commands.check import check as look
    from recipes_lib.training.layouts.launch_environment import plan_launch

    try:
        loaded = _load(recipe, config, overrides)
    except ConfigError as error:
        return list(error.problems)
    return look(loaded, plan_launch(None), Console(file=io.StringIO()))


def load_run(folder: str | Path) -> RunFiles:
    """Read the output directory of a run, finished or not.

    Args:
        folder: The output directory.

    Raises:
        DataError: It holds no run.
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
        argv.append(f"--{key}={value if isinstance(value, str) else json.dumps(value, default=str)}")
    return load_config(recipe, argv)


@contextmanager
def _importing_recipe(recipe: str) -> Iterator[Callable[[RecipeConfig], None]]:
    """Yield the main function of a recipe's script; reward functions beside it can be imported while it runs."""
    path = find_recipe(recipe)
    sys.path.insert(0, str(path.parent))
    try:
        yield runpy.run_path(str(path))["main"]
    finally:
        sys.path.remove(str(path.parent))

"""Python API: ``train`` and ``check`` a recipe, ``load_run`` reads the output directory of a run."""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.boundary import hide_expected_warnings
from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import find_recipe
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.stopping import STOP

if TYPE_CHECKING:
    from recipes_lib.config.schema import RecipeConfig
    from recipes_lib.report.run_files import RunFiles

Config = str | os.PathLike[str] | Mapping[str, Any] | None
_MAIN: Final = {"rloo": "grpo", "lora": "sft"}
"""Recipe -> the recipe whose script defines its main function."""
_ONE_RUN: Final = threading.RLock()
"""Held by the thread that trains or checks: random states and defaults of torch are of the process."""


def train(recipe: str, config: Config = None, **overrides: Any) -> RunFiles:
    """Train a recipe in this process, and return the finished run.

    Equivalent to ``python recipes/RECIPE.py --config F --key value``: an existing ``output_dir`` is resumed, and a
    finished run returns immediately. Use ``recipes launch`` to train with several processes. Random states and torch's
    defaults (dtype, device, gradient mode) of the caller have no effect on the run, and are restored after it.

    Args:
        recipe: Name of the recipe, such as ``sft``, ``dpo`` or ``grpo``.
        config: Path of a YAML file, or a mapping of keys to values.
        overrides: Keys that override those of ``config``, such as ``learning_rate=1e-5``.

    Returns:
        The run: ``path`` (the directory of the model), ``metrics`` (one mapping per logged step or evaluation, suitable
        for ``pandas.DataFrame``), ``facts`` and ``samples``.

    Raises:
        ConfigError: A key, a value or a combination of keys is invalid; lists every problem. Or ``torch.autocast`` is
            active.
        DataError: The data are invalid.
        DivergedError: A guard stopped the run before a bad update.
        PreemptedError: Ctrl-C, or the file ``STOP`` in ``output_dir``, stopped the training. Its last step is saved;
            the same call resumes it. A ``SystemExit``; Ctrl-C at other times, and again, raises ``KeyboardInterrupt``.

    Source: ``tests/test_api.py``.
    """
    loaded = _load(recipe, config, overrides)
    # A reward function or callback may change the working directory.
    output_dir = Path(loaded.training["output_dir"]).absolute()
    # Entered twice: imports draw random numbers, and torch may be imported only by them.
    with _ONE_RUN, _preserving_state():
        from recipes_lib.training.run import release_output_dirs

        try:
            with _importing_recipe(_MAIN.get(recipe, recipe)) as main, _preserving_state():
                main(loaded)
        finally:
            release_output_dirs()
    # Reference cycles: until the next full collection, a GPU would hold the model beside that of the next run.
    gc.collect()
    return load_run(output_dir)


def check(recipe: str, config: Config = None, **overrides: Any) -> list[Problem]:
    """Return every problem that ``recipes check`` finds for a run on one process; an empty list if it can train.

    Args:
        recipe: As for ``train``.
        config: As for ``train``.
        overrides: As for ``train``.
    """
    try:
        loaded = _load(recipe, config, overrides)
        with _ONE_RUN, _preserving_state():  # Entered twice, as in ``train``.
            from rich.console import Console

            from recipes_lib.commands.check import check as check_run
            from recipes_lib.training.layouts.launch_environment import plan_launch

            with _preserving_state():
                return check_run(loaded, plan_launch(None), Console(quiet=True))
    except ConfigError as error:
        return list(error.problems)


def load_run(folder: str | Path) -> RunFiles:
    """Read the output directory of a run, finished or not.

    Args:
        folder: The output directory.

    Raises:
        DataError: The folder contains no run.
    """
    from recipes_lib.report.run_files import read_run

    return read_run(Path(folder))


def _load(recipe: str, config: Config, overrides: Mapping[str, Any]) -> RecipeConfig:
    hide_expected_warnings()  # Before imports that warn.
    if recipe not in RECIPE_NAMES:
        remedy = f"write one of {', '.join(RECIPE_NAMES)}"
        raise ConfigError(Problem("recipe", f"there is no recipe {recipe!r}", remedy))
    argv, keys = [], dict(overrides)
    if isinstance(config, Mapping):
        keys = {**config, **overrides}
    elif isinstance(config, str | os.PathLike):
        argv = ["--config", str(config)]
    elif config is not None:
        found = f"is of type {type(config).__name__}"
        raise ConfigError(Problem("config", found, "give the path of a YAML file, or a mapping of keys to values"))
    return load_config(recipe, [*argv, *(f"--{key}={_format_value(value)}" for key, value in keys.items())])


def _format_value(value: Any) -> str:
    """Return a Python value as the text of a flag: JSON, except strings."""
    plain = _simplify(value)
    return plain if isinstance(plain, str) else json.dumps(plain, default=_simplify)


def _simplify(value: Any) -> Any:
    """Return an enum, NumPy value, mapping, iterable, function, dtype or path as a value that JSON supports."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "to_parquet"):  # Of `datasets` or pandas; a run names its data, so that it can resume.
        found = "rows are given as an object, and are read from files"
        raise ConfigError(Problem(type(value).__name__, found, "write them with its `to_parquet`, and give the path"))
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    if hasattr(value, "__qualname__"):  # A function or class, which is configured by its name.
        path = f"{value.__module__}:{value.__qualname__}"
        # `functools.wraps` gives a wrapper the name of what it wraps, which alone would be called.
        if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is not value:
            remedy = "define it by `def` or `class`, outside of functions and classes, under a name of its own"
            raise ConfigError(Problem(path, "this name is not that of the given function or class", remedy))
        return path
    own = "torch." if type(value).__module__ == "torch" else ""  # Of a dtype.
    return value if isinstance(value, bool | int | float | str | None) else str(value).removeprefix(own)


@contextmanager
def _preserving_state() -> Iterator[None]:
    """Run the block with torch's defaults; restore the caller's random states, defaults and progress bars after it."""
    # A package that is not imported yet has no state. This module must not import torch: see ``FREE_OF_TORCH``.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    with ExitStack() as stack:
        # A request, and the end, of a run or a failed command concern that alone.
        STOP.reset()
        stack.callback(STOP.reset)
        stack.callback(random.setstate, random.getstate())
        if logging := sys.modules.get("transformers.utils.logging"):
            stack.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(None))
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            if getattr(sys, name) is None:  # The script was started without it (`>&-`, pythonw).
                stack.enter_context(redirect(stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))))
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if torch is not None:
            depth = torch.autocast_increment_nesting()
            torch.autocast_decrement_nesting()
            if depth > 1:
                found = "is active, and its cached copies of the weights would not follow their updates"
                raise ConfigError(Problem("torch.autocast", found, "leave it; the key `bf16` chooses the precision"))
            gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()  # ``memory_bytes`` would be that of an earlier run.
            stack.enter_context(torch.random.fork_rng(gpus))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
            # `tf32`, `torch_compile` and `full_determinism` would set them for later runs too.
            stack.callback(setattr, torch.backends, "fp32_precision", torch.backends.fp32_precision)
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _importing_recipe(recipe: str) -> Iterator[Callable[[RecipeConfig], None]]:
    """Yield the main function of a recipe's script, with the script's folder importable, as for ``python SCRIPT``."""
    path = find_recipe(recipe)
    sys.path.insert(0, str(path.parent))
    try:
        yield runpy.run_path(str(path))["main"]
    finally:
        sys.path.remove(str(path.parent))

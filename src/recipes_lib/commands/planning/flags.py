"""Flags of ``recipes plan``, ``scale`` and ``run``, parsed before torch is imported, for a fast ``--help``."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.commands.clean import plan as plan_corpus
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import add_recipe_flags, load_for_command, split_recipe
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.pipelines.pipeline import holds
from recipes_lib.planning.failures import GPU_HOURS_BETWEEN_FAILURES
from recipes_lib.training.layouts.launch_environment import add_pipeline_flags

_PLAN: Final = (
    "GPU memory, time and schedule of a run, from its YAML alone; no data, weights or network. Pretraining: tokens, "
    "hours and learning-rate schedule. Fine-tuning: time of an optimizer step. RL: time of an iteration. All: memory."
)
_SCALE: Final = "Write small runs, fit scaling laws of loss in parameters and tokens, and predict larger runs."
_SCALES: Final = {
    "sweep": "write small runs, and a pipeline that fits a law to them",
    "fit": "fit a law to finished runs",
    "plan": "optimal parameters and tokens for a compute budget",
    "predict": "predict the loss of a run",
}


def plan(argv: Sequence[str]) -> None:
    """Run ``recipes plan``.

    Raises:
        ConfigError: The configuration is invalid; or as ``recipes_lib.commands.planning.plan.run``.
    """
    recipe, rest = split_recipe(argv, (*RECIPE_NAMES, "corpus"))
    if recipe == "corpus":
        plan_corpus(rest)
        return
    options, overrides = _build_plan_parser().parse_known_args(argv)
    config = load_for_command(recipe, overrides, options.config)
    # After the configuration: its errors need no torch, which takes seconds to import.
    from recipes_lib.commands.planning.plan import run

    run(config, options, overrides, list(find_problems("plan", options, recipe)))


def scale(argv: Sequence[str]) -> None:
    """Run ``recipes scale``.

    Raises:
        ConfigError: A flag is out of range; or as ``recipes_lib.commands.planning.scale.run``.
        DataError: As there.
    """
    options = _build_scale_parser().parse_args(argv)
    if problems := list(find_problems(f"scale {options.command}", options)):
        raise ConfigError(*problems)
    from recipes_lib.commands.planning.scale import run

    run(options)


_COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_HOURS: Final = {
    "": 1.0,
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 1 / 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 1.0),
    **dict.fromkeys(("d", "day", "days"), 24.0),
}
_CURRENCIES: Final = re.compile(r"[$€£]|usd|eur|gbp", re.IGNORECASE)
"""Removed from amounts of money, which are not converted."""
_QUANTITY: Final = re.compile(r"([+-]?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d*)\.?\d*(?:e[+-]?\d+)?)\s*([a-z%]*)")


def _read_quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number with an optional unit, such as ``1,000``, ``40%``, ``1.4T`` or ``2 days``, in the base unit."""
    found = _QUANTITY.fullmatch(text.strip().lower().replace("_", ""))
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, optionally with a unit: {known}")
    return float(found[1].replace(",", "")) * units[found[2]]


_TYPES: Final[Mapping[str, Callable[[str], Any]]] = {
    **{"int": int, "float": float, "path": Path, "words": shlex.split},
    "money": lambda text: _read_quantity(_CURRENCIES.sub("", text), _COUNTS),
    "count": partial(_read_quantity, units=_COUNTS),
    "share": partial(_read_quantity, units={"": 1.0, "%": 0.01}),
    "hours": partial(_read_quantity, units=_HOURS),
}
_FLAGS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = yaml.safe_load(
    Path(__file__).with_name("flags.yaml").read_text("utf-8")
)
"""Flags of each command with their options."""
_RULES: Final = ("range", "with", "without", "recipes", "remedy")
"""Keys of ``flags.yaml`` that are not argparse's."""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the flags of a command in ``flags.yaml``."""
    for name, options in _FLAGS[command].items():
        given = {key: value for key, value in options.items() if key not in _RULES}
        given |= {"type": _TYPES[given["type"]]} if "type" in given else {}
        given |= {"metavar": tuple(given["metavar"])} if isinstance(given.get("metavar"), list) else {}
        parser.add_argument(f"--{name}", **given)


def find_problems(command: str, options: argparse.Namespace, recipe: str = "") -> Iterator[Problem]:
    """Yield the flags that are out of range, not for this recipe, or wrong beside the others.

    Args:
        command: Name of the command in ``flags.yaml``.
        options: Parsed flags.
        recipe: Recipe of the run; empty for commands without recipes.
    """
    given = {name: value for name, value in vars(options).items() if value is not None and value is not False}
    for name, rules in _FLAGS[command].items():
        if (value := given.get(name)) is None:
            continue
        if recipe not in rules.get("recipes", [recipe]):
            yield Problem(f"--{name}", f"is only for {', '.join(rules['recipes'])}", rules["remedy"])
        if (needed := rules.get("with")) and given.keys().isdisjoint(needed):
            yield Problem(f"--{name}", f"needs --{' or --'.join(needed)}", "write it too, or remove this one")
        for other in filter(given.__contains__, rules.get("without", ())):
            yield Problem(f"--{name}", f"excludes --{other}", "remove one of them")
        for wanted in rules.get("range", ()):
            if not (math.isfinite(value) and holds(wanted, value)):
                yield Problem(f"--{name}", f"is {value:g}", f"write a finite number {' and '.join(rules['range'])}")
                break


def _build_plan_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="recipes plan", description=_PLAN)
    add_recipe_flags(parser)
    # First: since Python 3.14, argparse formats the help of a flag, which shows its default, when the flag is added.
    parser.set_defaults(failure_hours=GPU_HOURS_BETWEEN_FAILURES)
    add_flags(parser, "plan")
    add_pipeline_flags(parser)
    return parser


def _build_scale_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="recipes scale", description=_SCALE)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in _SCALES.items():
        command = commands.add_parser(name, help=about)
        if name == "fit":
            text = "output directories of finished pretraining runs with a decayed learning rate"
            command.add_argument("runs", nargs="+", type=Path, help=text)
        add_flags(command, f"scale {name}")
    return parser

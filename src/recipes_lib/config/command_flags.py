"""Parser of a command's flags, which ``flags.yaml`` describes: types with units, and rules between flags."""

from __future__ import annotations

import argparse
import json
import math
import operator
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.table import TABLES, load_table, read_lists
from recipes_lib.errors import ConfigError, Problem

Flags = Mapping[str, Mapping[str, Any]]
"""Flags by name, in the format of ``flags.yaml``."""

COMPARISONS: Final = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
# `<=` precedes `<` in the alternation, or `<= 2` would be read as `<` and "= 2".
REQUIREMENT: Final = re.compile(
    rf"\s*({'|'.join(COMPARISONS)})\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
)
"""Condition on a number, such as ``> 0.65``."""
FLAGS: Final = read_lists(Path(__file__).with_name("flags.yaml"))
"""Commands by name, each with its flags and the options of its parser; and flags of several commands."""
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
_RULES: Final = ("positional", "range", "with", "without", "recipes", "remedy")
"""Keys of a flag that are not argparse's."""


def _read_quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number with an optional unit, such as ``1,000``, ``40%``, ``1.4T`` or ``2 days``, in the base unit."""
    found = _QUANTITY.fullmatch(text.strip().lower().replace("_", ""))
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, optionally with a unit: {known}")
    return float(found[1].replace(",", "")) * units[found[2]]


def _read_value(text: str, load: Callable[[str], Any], kind: type, described: str) -> Any:
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        if isinstance(value := load(text), kind):
            return value
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not {described}")


def _read_path(text: str) -> Path:
    if not text:  # `Path("")` is the current folder.
        raise argparse.ArgumentTypeError("is an empty text, as of an unset shell variable")
    return Path(text)


_TYPES: Final[Mapping[str, Callable[[str], Any]]] = {
    **{"int": int, "float": float, "path": _read_path, "words": shlex.split},
    "boolean": partial(_read_value, load=yaml.safe_load, kind=bool, described="true or false"),
    "mapping": partial(_read_value, load=json.loads, kind=dict, described="a JSON object"),
    "money": lambda text: _read_quantity(_CURRENCIES.sub("", text), _COUNTS),
    "count": partial(_read_quantity, units=_COUNTS),
    "share": partial(_read_quantity, units={"": 1.0, "%": 0.01}),
    "hours": partial(_read_quantity, units=_HOURS),
}


def add_flags(parser: argparse._ActionsContainer, flags: Flags) -> None:
    """Add flags to a parser or to a group of it."""
    for name, options in flags.items():
        given = {key: value for key, value in options.items() if key not in _RULES}
        given |= {"type": _TYPES[given["type"]]} if "type" in given else {}
        given |= {"metavar": tuple(given["metavar"])} if isinstance(given.get("metavar"), list) else {}
        parser.add_argument(name if options.get("positional") else f"--{name}", **given)


def find_problems(flags: Flags, options: argparse.Namespace, recipe: str = "") -> Iterator[Problem]:
    """Yield the flags that are out of range, not for this recipe, or wrong beside the others.

    Args:
        flags: Flags with their rules.
        options: Parsed flags.
        recipe: Recipe of the run; empty for commands without recipes.
    """
    given = {name: value for name, value in vars(options).items() if value is not None and value is not False}
    for name, rules in flags.items():
        if (value := given.get(rules.get("dest", name))) is None:
            continue
        if recipe not in rules.get("recipes", [recipe]):
            yield Problem(f"--{name}", f"is only for {', '.join(rules['recipes'])}", rules["remedy"])
        excluded = [other for other in rules.get("without", ()) if other in given]
        if (needed := rules.get("with")) and given.keys().isdisjoint(needed) and not excluded:
            yield Problem(f"--{name}", f"needs --{' or --'.join(needed)}", "write it too, or remove this one")
        for other in excluded:
            yield Problem(f"--{name}", f"excludes --{other}", "remove one of them")
        for wanted in rules.get("range", ()):
            if not (math.isfinite(value) and holds(wanted, value)):
                yield Problem(f"--{name}", f"is {value:g}", f"write a finite number {' and '.join(rules['range'])}")
                break


def holds(wanted: str, value: float) -> bool:
    """Return whether a value meets a requirement such as ``> 0.65``; NaN meets none."""
    match = REQUIREMENT.fullmatch(wanted)
    assert match is not None
    return bool(COMPARISONS[match[1]](value, float(match[2])))


class CommandParser(argparse.ArgumentParser):
    """Parser of ``--name value`` flags: abbreviations are refused, and for a misspelt flag, the right one is suggested.

    Args:
        command: Name of a command in ``flags.yaml``, whose flags are added, and verified when they are parsed; empty
            for a parser without flags.
        options: Those of argparse, in addition to those of the command.
    """

    def __init__(self, command: str = "", **options: Any) -> None:
        described = {"prog": f"recipes {command}", **FLAGS[command]} if command else {}
        self.flags: Flags = described.pop("flags", {})
        names = described.pop("commands", ())
        super().__init__(allow_abbrev=False, **{**described, **options})
        add_flags(self, self.flags)
        if names:
            parsers = self.add_subparsers(dest="command", required=True)
            for inner in (f"{command} {name}" for name in names):
                parsers.add_parser(inner.split()[-1], command=inner, help=FLAGS[inner]["description"])

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Return the parsed flags and the other arguments, which may be keys of a recipe.

        Raises:
            ConfigError: A flag is misspelt, out of range, or wrong beside the others.
            SystemExit: argparse has printed an error or the help.
        """
        # Before argparse, which would report the flag that was meant as missing.
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self._refuse_misspelt(flag.removeprefix("--"))
        options, rest = super().parse_known_args(words, namespace)
        if problems := list(find_problems(self.flags, options)):
            raise ConfigError(*problems)
        return options, rest

    def _refuse_misspelt(self, name: str) -> None:
        # Needed for keys and errors only: commands without a recipe start faster.
        import difflib

        from recipes_lib.config.loader import read_synonyms

        flags = {flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")}
        # Keys of recipes, also by their names in other programs, are explained by the loader of the configuration.
        keys, synonyms = {key for table in TABLES for key in load_table(table).keys}, read_synonyms()
        near = difflib.get_close_matches(name, sorted(flags | keys | synonyms.keys()), n=1)
        if (meant := synonyms.get(name, *near)) in flags:
            raise ConfigError(Problem(f"--{name}", "is unknown", f"did you mean `--{meant}`?"))

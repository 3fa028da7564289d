"""Parser of a command's flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from recipes_lib.errors import ConfigError, Problem


class CommandParser(argparse.ArgumentParser):
    """Parser of ``--name value`` flags: abbreviations are refused, and for a misspelt flag, the right one is suggested.

    Args:
        options: Those of argparse.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Return the parsed flags and the other arguments, which may be keys of a recipe.

        Raises:
            ConfigError: A flag is misspelt.
            SystemExit: argparse has printed an error or the help.
        """
        # Before argparse, which would report the flag that was meant as missing.
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self._refuse_misspelt(flag.removeprefix("--"))
        return super().parse_known_args(words, namespace)

    def _refuse_misspelt(self, name: str) -> None:
        # Needed for keys and errors only: commands without a recipe start faster.
        import difflib

        from recipes_lib.config.loader import read_synonyms
        from recipes_lib.config.table import TABLES, load_table

        flags = {flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")}
        # Keys of recipes, also by their names in other programs, are explained by the loader of the configuration.
        keys, synonyms = {key for table in TABLES for key in load_table(table).keys}, read_synonyms()
        near = difflib.get_close_matches(name, sorted(flags | keys | synonyms.keys()), n=1)
        if (meant := synonyms.get(name, *near)) in flags:
            raise ConfigError(Problem(f"--{name}", "is unknown", f"did you mean `--{meant}`?"))

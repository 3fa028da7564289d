"""``recipes completion``: shell script for tab completion of commands, recipes, keys and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from recipes_lib.cli import COMMANDS
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table


def main(argv: Sequence[str]) -> None:
    """Run the command: print the script."""
    shell = CommandParser("completion").parse_args(argv).shell
    keys = sorted({name for table in TABLES for name in load_table(table).keys} | {"config", "recipe"})
    # `recipes sft` is short for `recipes launch sft`.
    commands = [*COMMANDS, *RECIPE_NAMES, "train", "help"]
    words = {"commands": commands, "recipes": TABLES, "keys": [f"--{key}" for key in keys]}
    folder = FileSystemLoader(Path(__file__).with_name("completions"))
    template = Environment(loader=folder, trim_blocks=True, keep_trailing_newline=True).get_template(f"{shell}.jinja")
    sys.stdout.write(template.render({name: " ".join(found) for name, found in words.items()}))

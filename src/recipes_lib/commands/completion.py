"""``recipes completion``: shell script for tab completion of commands, recipes, keys, flags and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from recipes_lib.cli import COMMANDS
from recipes_lib.config.command_flags import FLAGS, CommandParser
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table


def main(argv: Sequence[str]) -> None:
    """Run the command: print the script."""
    shell = CommandParser("completion").parse_args(argv).shell
    # Groups of several commands are flags themselves; other entries of a command are options of its parser.
    flags = {**FLAGS["planning"], **FLAGS["machines"], **FLAGS["clouds"]}
    flags |= {name: flag for command in FLAGS.values() for name, flag in command.get("flags", {}).items()}
    keys = {name for name, flag in flags.items() if not flag.get("positional")}
    keys |= {name for table in TABLES for name in load_table(table).keys}
    # `recipes sft` is short for `recipes launch sft`.
    commands = [*COMMANDS, *RECIPE_NAMES, "train", "help"]
    words = {"commands": commands, "recipes": TABLES, "keys": [f"--{key}" for key in sorted(keys)]}
    folder = FileSystemLoader(Path(__file__).with_name("completions"))
    template = Environment(loader=folder, trim_blocks=True, keep_trailing_newline=True).get_template(f"{shell}.jinja")
    sys.stdout.write(template.render({name: " ".join(found) for name, found in words.items()}))

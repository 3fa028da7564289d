"""``recipes completion``: shell script for tab completion of commands, recipes, keys and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from recipes_lib.cli import COMMANDS
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table

_BASH: Final = """\
_recipes() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  elif [ "$last" = --recipe ]; then COMPREPLY=($(compgen -W "{recipes}" -- "$word"))
  elif [[ "$word" == --* ]]; then COMPREPLY=($(compgen -W "{keys}" -- "$word"))
  fi
}}
complete -o default -o bashdefault -F _recipes recipes
"""
# zsh runs completion functions of bash, COMP_WORDS and compgen included; its `complete` needs `compdef`.
_ZSH: Final = """\
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit; }}
autoload -U +X bashcompinit && bashcompinit
"""
_FISH: Final = """\
complete -c recipes -n __fish_use_subcommand -f -a "{commands}"
complete -c recipes -n "__fish_prev_arg_in --recipe" -f -a "{recipes}"
for key in {keys}
  complete -c recipes -n "not __fish_use_subcommand" -l (string replace -- -- "" $key)
end
"""
SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH + _BASH, "fish": _FISH}


def main(argv: Sequence[str]) -> None:
    """Run the command: print the script."""
    parser = CommandParser(
        prog="recipes completion",
        description="Print a shell script that completes commands, recipes, keys and files.",
        epilog='bash and zsh: eval "$(recipes completion bash)" in ~/.bashrc or ~/.zshrc; fish: recipes completion '
        "fish > ~/.config/fish/completions/recipes.fish",
    )
    parser.add_argument("shell", choices=SCRIPTS)
    shell = parser.parse_args(argv).shell
    keys = sorted({name for table in TABLES for name in load_table(table).keys} | {"config", "recipe"})
    # `recipes sft` is short for `recipes launch sft`.
    commands = [*COMMANDS, *RECIPE_NAMES, "train", "help"]
    words = {"commands": commands, "recipes": TABLES, "keys": [f"--{key}" for key in keys]}
    sys.stdout.write(SCRIPTS[shell].format(**{name: " ".join(found) for name, found in words.items()}))

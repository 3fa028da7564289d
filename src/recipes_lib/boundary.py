"""The one place where an exception becomes an exit code; every command and every recipe runs inside it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from recipes_lib.errors import EXIT_BUG, EXIT_DONE, DivergedError, UserError

if TYPE_CHECKING:
    from recipes_lib.config.schema import RecipeConfig

EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C (128 + SIGINT)."""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; what it raises is told on standard error.

    The user's mistakes are told without a traceback, each with its remedy; anything unforeseen is a bug and keeps its
    traceback. ``SystemExit`` passes through.

    Args:
        command: Takes nothing; returns an exit code, or ``None`` when there is nothing to report.

    Returns:
        One of the ``EXIT_`` codes of :mod:`recipes_lib.errors`, or ``EXIT_INTERRUPTED``.
    """
    try:
        return command() or EXIT_DONE
    except (UserError, DivergedError) as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        sys.stderr.write(
            "This is a bug in recipes-lib, not a mistake of yours: please report it with the lines above.\n"
        )
        return EXIT_BUG


def parse_or_exit(stage: str, arguments: Sequence[str]) -> RecipeConfig:
    """Return the configuration that a recipe's arguments ask for; imports nothing slow.

    Args:
        stage: Name of the recipe, ``sft``.
        arguments: What follows the script's name.

    Raises:
        SystemExit: The configuration is wrong, or only ``--help`` or ``--print-config`` was asked for.
    """
    from recipes_lib.config.loader import parse_command  # `recipes --help` comes here too, and needs no YAML.

    parsed: list[RecipeConfig] = []

    def parse() -> None:
        outcome = parse_command(stage, arguments)
        if isinstance(outcome, str):
            sys.stdout.write(f"{outcome}\n")
        else:
            parsed.append(outcome)

    code = run_command(parse)
    if not parsed:
        sys.exit(code)
    return parsed[0]

"""``recipes plan`` and ``recipes scale``: flags are parsed before torch is imported, for a fast ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from recipes_lib.commands.clean import plan as plan_corpus
from recipes_lib.config.command_flags import FLAGS, CommandParser, add_flags, find_problems
from recipes_lib.config.loader import load_for_command, split_recipe
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.training.layouts.launch_environment import add_pipeline_flags

GPU_HOURS_BETWEEN_FAILURES: Final = 54 * 24 * 16_384 / 419
"""Source: Dubey et al. 2024 (Llama 3), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100."""


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

    run(config, options, overrides, list(find_problems(FLAGS["planning"], options, recipe)))


def scale(argv: Sequence[str]) -> None:
    """Run ``recipes scale``.

    Raises:
        ConfigError: A flag is out of range; or as ``recipes_lib.commands.planning.scale.run``.
        DataError: As there.
    """
    options = CommandParser("scale").parse_args(argv)
    from recipes_lib.commands.planning.scale import run

    run(options)


def _build_plan_parser() -> argparse.ArgumentParser:
    parser = CommandParser("plan")
    # First: since Python 3.14, argparse formats the help of a flag, which shows its default, when the flag is added.
    parser.set_defaults(failure_hours=GPU_HOURS_BETWEEN_FAILURES)
    add_flags(parser, FLAGS["planning"])
    add_pipeline_flags(parser)
    return parser

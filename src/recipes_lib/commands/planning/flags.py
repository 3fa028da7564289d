"""``recipes plan`` and ``recipes scale``: flags are parsed before torch is imported, for a fast ``--help``."""

from __future__ import annotations

from collections.abc import Sequence

from recipes_lib.commands.clean import plan as plan_corpus
from recipes_lib.config.command_flags import FLAGS, CommandParser, add_flags, find_problems
from recipes_lib.config.loader import choose_recipe, drop_flags, load_for_command
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.training.layouts.launch_environment import add_pipeline_flags


def plan(argv: Sequence[str]) -> None:
    """Run ``recipes plan``.

    Raises:
        ConfigError: The configuration is invalid; or as ``recipes_lib.commands.planning.plan.run``.
    """
    parser = CommandParser("plan")
    # Verified below, where the recipe is known.
    add_flags(parser, FLAGS["planning"])
    add_pipeline_flags(parser)
    options, overrides = parser.parse_known_args(argv)
    recipe = choose_recipe(options.recipe, options.config, (*RECIPE_NAMES, "corpus"))
    if recipe == "corpus":
        plan_corpus(drop_flags(argv, ["recipe"]))
        return
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

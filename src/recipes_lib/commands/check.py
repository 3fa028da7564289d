"""``recipes check``: report all problems of a run at once, on a CPU, with the functions that training calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from recipes_lib.commands.clean import check as check_corpus
from recipes_lib.commands.evaluate import check as check_evaluation
from recipes_lib.commands.generated.synthesize import check as check_synthesis
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import choose_recipe, drop_flags, load_for_command
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.paths import find_launch_file
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import TABLES
from recipes_lib.errors import EXIT_DONE, EXIT_USER, Problem
from recipes_lib.quantities import pluralize
from recipes_lib.training.layouts.launch_environment import Launch, add_pipeline_flags, name_pipeline, plan_launch


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 without problems, else 2.

    Raises:
        ConfigError: The configuration is invalid or the launch file does not exist, so that nothing else can be
            checked.
    """
    parser = CommandParser("check")
    add_pipeline_flags(parser)
    options, overrides = parser.parse_known_args(argv)
    recipe = choose_recipe(options.recipe, options.config, TABLES)
    checks = {"corpus": check_corpus, "eval": check_evaluation, "synthesize": check_synthesis}
    if recipe in checks:
        return checks[recipe](drop_flags(argv, ["recipe"]))
    if options.migrate:
        return _print_migration(options.migrate, recipe if options.recipe else None)
    config = load_for_command(recipe, overrides, options.config)
    launch_file = find_launch_file(options.hardware) if options.hardware else None
    pipeline = name_pipeline(options.pipeline_stages, options.pipeline_schedule)
    launch = plan_launch(launch_file, options.num_processes, pipeline)
    return EXIT_USER if check(config, launch, Console(highlight=False), launch_file) else EXIT_DONE


def check(config: RecipeConfig, launch: Launch, console: Console, launch_file: Path | None = None) -> list[Problem]:
    """Check every part of a run, print facts and problems, and return the problems.

    Args:
        config: Configuration of the run, whose keys are valid.
        launch: Processes and parallel layout of the run.
        console: Console for the findings.
        launch_file: Launch file of the run; ``None`` if it is not known.
    """
    from recipes_lib.inspection.recipe_checks import INSPECTIONS

    inspection = INSPECTIONS[config.recipe](config, launch, console, launch_file)
    inspection.run()
    count = len(inspection.problems)
    console.print(f"\n{pluralize(count, 'problem')}, marked with ✗" if count else "\nready to train")
    return inspection.problems


def _print_migration(path: Path, recipe: str | None) -> int:
    """Print the converted file on standard output; changes and open decisions on standard error."""
    migration = migrate(path, recipe)
    sys.stdout.write(migration.text)
    for change in migration.changes:
        place = f"{path}:{change.line}" if change.line else str(path)
        sys.stderr.write(f"{'you decide' if change.by_hand else 'changed'}  {place}: {change.what}\n")
    if not migration.is_ready:
        sys.stderr.write("not complete: resolve the last lines above\n")
        return EXIT_USER
    found = migration.recipe
    sys.stderr.write(f"a recipe of {found}: name the file {found}.yaml or {found}_*.yaml, or write --recipe {found}\n")
    return EXIT_DONE

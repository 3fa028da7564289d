"""The life of a recipe around its training: start or resume, publish, and leave the model card and the report."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.publish.card import write_card
from recipes_lib.publish.publishing import publishing
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import Run, start_run


def recipe(train: Callable[[Run], None]) -> Callable[[RecipeConfig], None]:
    """Make a recipe of a function that trains: the run is started or resumed, recorded, published and reported.

    A run that was done before this process began is not trained again, but has its card and report made where they are
    missing.

    Args:
        train: Trains ``run.config`` and exports the model; every process calls it. With another number of processes
            than before, ``run.config`` has another accumulation than the given configuration.

    Raises:
        ConfigError: As ``start_run`` and ``publishing``.
    """

    @functools.wraps(train)
    def main(config: RecipeConfig) -> None:
        run = start_run(config, read_launch())
        if not run.finished:
            with run.recording_its_end():
                train(run)
        finish_run(run)

    return publishing(main)


def finish_run(run: Run) -> None:
    """Leave a report of a run that is done, and a card where it has none, and tell where everything is.

    Args:
        run: Just done, or ``finished`` before this process began; every process may call, the main one acts.
    """
    if not run.launch.is_main:
        return
    card, report = run.output_dir / "README.md", run.output_dir / "report.html"
    if not card.is_file() or not card.stat().st_size:
        files = read_run(run.output_dir)
        last = files.evaluations[-1] if files.evaluations else {}
        figures = {name: value for name, value in last.items() if name.startswith("eval_")}
        write_card(run.output_dir, files.facts, figures)
    # A page that was cut off has no end.
    is_whole = report.is_file() and "</html>" in report.read_text(encoding="utf-8", errors="replace")[-16:]
    if not run.finished or not is_whole:
        build_report(run.output_dir)
    sys.stdout.write(f"done: model {run.output_dir}, card {card}, report {report}\n")

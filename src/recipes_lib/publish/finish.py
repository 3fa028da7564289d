"""What a finished run leaves besides its model: the card and the report, made once and again where they are missing."""

from __future__ import annotations

import sys

from recipes_lib.publish.card import write_card
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run
from recipes_lib.training.run import Run


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

"""``report.html`` of an evaluation: scores, and every question with its answer and verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment

from recipes_lib.files import read_lines, read_record

MAX_QUESTIONS: Final = 500
"""Of a task that the page shows; all stand in ``samples.jsonl``."""
MAX_TEXT: Final = 1500
"""Characters of a prompt, from its end: the question follows the worked examples."""


def write_eval_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of an evaluation and return its path.

    The page needs no network; a script of its own filters the questions. What comes from models and data is escaped.

    Raises:
        DataError: The folder holds no evaluation.
    """
    record = read_record(folder / "eval.json", {"model": dict, "tasks": dict, "groups": dict})
    samples: dict[str, list[dict[str, Any]]] = {}
    for row in read_lines(folder / "samples.jsonl"):
        if row is not None and len(rows := samples.setdefault(str(row["task"]), [])) < MAX_QUESTIONS:
            rows.append(row | {"prompt": row["prompt"][-MAX_TEXT:], "verdict": judge(row)})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    here = Path(__file__)
    page = environment.from_string(here.with_name("eval.html.jinja").read_text(encoding="utf-8")).render(
        record=record,
        samples=samples,
        shown=MAX_QUESTIONS,
        style=here.with_name("page.css").read_text(encoding="utf-8"),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def judge(row: Mapping[str, Any]) -> str:
    """Return ``right`` or ``wrong`` by the first score of a question that is 0 or 1; nothing where none is."""
    verdicts = (value for value in row["scores"].values() if value in (0, 1))
    verdict = next(verdicts, None)
    return "" if verdict is None else "right" if verdict else "wrong"

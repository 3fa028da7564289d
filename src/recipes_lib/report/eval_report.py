"""Pages of an evaluation: scores with every question, answer and verdict; losses of rows with their extremes."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import Environment

from recipes_lib.files import read_lines, read_record, replace_text

MAX_QUESTIONS: Final = 500
"""Of a task that the page shows; all stand in ``samples.jsonl``."""
MAX_TEXT: Final = 1500
"""Characters of a prompt, from its end: the question follows the worked examples; of a scored row, from its start."""
NUM_EXTREMES: Final = 20
"""Rows of the highest and of the lowest loss that a page of row scores shows."""
_NUM_BARS: Final = 40
_QUANTILES: Final = (0.01, 0.1, 0.5, 0.9, 0.99)


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
    path = folder / "report.html"
    _write_page(path, "eval.html.jinja", record=record, samples=samples, shown=MAX_QUESTIONS)
    return path


def write_score_report(scored: Path, column: str) -> Path:
    """Write a page beside a file of scored rows: quantiles, a histogram, the highest and the lowest; return its path.

    Memory does not grow with the rows' texts.

    Args:
        scored: Of ``recipes score``, JSON Lines.
        column: Of the losses.
    """
    losses, num_empty = [], 0
    highest: list[tuple[float, int, str]] = []
    lowest: list[tuple[float, int, str]] = []
    for number, row in enumerate(read_lines(scored), start=1):
        if row is None or row.get(column) is None:
            num_empty += 1
            continue
        losses.append(loss := float(row[column]))
        text = _show_row(row)
        for heap, key in ((highest, loss), (lowest, -loss)):
            change = heapq.heappush if len(heap) < NUM_EXTREMES else heapq.heappushpop
            change(heap, (key, number, text))
    given: dict[str, Any] = {}
    if losses:
        counts, edges = np.histogram(losses, bins=_NUM_BARS)
        quantiles = np.quantile(losses, _QUANTILES)
        given = {
            "bars": counts.tolist(),
            "edges": [edges[0], edges[-1]],
            "quantiles": {f"{share:.0%}": value for share, value in zip(_QUANTILES, quantiles, strict=True)},
            "extremes": {
                "Highest loss": sorted(highest, reverse=True),
                "Lowest loss": [(-loss, number, text) for loss, number, text in sorted(lowest, reverse=True)],
            },
        }
    path = scored.with_name(f"{scored.name}.html")
    _write_page(path, "scores.html.jinja", name=scored.name, column=column, losses=losses, num_empty=num_empty, **given)
    return path


def _show_row(row: Mapping[str, Any]) -> str:
    """The row as a person reads it, cut: turns under their roles, other columns by name."""
    parts = []
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
            named = ((turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in value)
            parts += [f"[{role}] {content}" for role, content in named]
        else:
            parts.append(f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}")
    return "\n".join(parts)[:MAX_TEXT]


def _write_page(path: Path, template: str, **given: Any) -> None:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    here = Path(__file__)
    source = here.with_name(template).read_text(encoding="utf-8")
    style = here.with_name("page.css").read_text(encoding="utf-8")
    page = environment.from_string(source).render(style=style, **given)
    replace_text(path, page.encode(errors="replace").decode())


def judge(row: Mapping[str, Any]) -> str:
    """Return ``right`` or ``wrong`` by the first score of a question that is 0 or 1; nothing where none is."""
    verdicts = (value for value in row["scores"].values() if value in (0, 1))
    verdict = next(verdicts, None)
    return "" if verdict is None else "right" if verdict else "wrong"

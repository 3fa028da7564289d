"""Renders offline HTML pages: those of corpora, evaluations, scored rows and synthetic data."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import Environment, FileSystemLoader

from recipes_lib.files import atomic_file, read_lines, read_record

Record = Mapping[str, Any]

MAX_QUESTIONS: Final = 500
"""Maximum questions per task on the page of an evaluation; ``samples.jsonl`` has all."""
MAX_SHOWN: Final = 5000
"""Maximum questions on the page of an evaluation, divided over its tasks: a group such as MMLU has 57."""
MAX_TEXT: Final = 1500
"""Maximum characters of a prompt, from its end (the question follows the few-shot examples), an answer and a row."""
NUM_EXTREMES: Final = 20
"""Number of rows with the highest and with the lowest loss on a page of row scores."""
_NUM_BARS: Final = 40
_QUANTILES: Final = (0.01, 0.1, 0.5, 0.9, 0.99)


def write_page(
    path: Path, template: str, filters: Mapping[str, Callable[..., str]] | None = None, **values: Any
) -> Path:
    """Render a template to ``path`` and return the path; values are HTML-escaped.

    Args:
        path: Path of the page.
        template: Name of the template in this folder, without ``.html.jinja``.
        filters: Additional Jinja filters.
        **values: Variables of the template, in addition to ``style`` (CSS) and ``hover`` (script).

    Raises:
        OSError: The page cannot be written.
    """
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters or {}
    style, hover = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "hover.js"))
    page = environment.get_template(f"{template}.html.jinja").render(style=style, hover=hover, **values)
    # Shared: `recipes runs` may write the page of a pipeline that is running, which a failure of its own would end.
    with atomic_file(path, is_shared=True) as partial:
        # Model output and file names may contain lone surrogates, which UTF-8 cannot encode.
        partial.write_text(page, encoding="utf-8", errors="replace")
    return path


def write_corpus_report(folder: Path, manifest: Record, samples: Mapping[str, Sequence[Record]]) -> Path:
    """Write ``report.html`` of a corpus and return its path: removals of each step with reasons and samples.

    Args:
        folder: Folder of the corpus.
        manifest: Contents of ``corpus.json``.
        samples: Sample documents by ``step: reason`` (removed), by ``step`` (changed), and under ``kept``.
    """
    return write_page(
        folder / "report.html",
        "corpus",
        {
            "count": lambda number: "" if number is None else f"{number:,}",
            "share": lambda part, whole: f"{part / whole:.1%}" if whole else "",
        },
        manifest=manifest,
        name=folder.resolve().name,
        start=next(iter(manifest["steps"].values())),
        removals=list_removals(manifest),
        found={step: tally["found"] for step, tally in manifest["steps"].items() if tally["found"]},
        samples=samples,
    )


def list_removals(manifest: Record) -> list[tuple[str, str, int, int]]:
    """Return ``(step, reason, documents, bytes)`` of all removals, in the order of the steps."""
    return [
        (step, reason, count, tally["removed_bytes"].get(reason, 0))
        for step, tally in manifest["steps"].items()
        for reason, count in sorted(tally["removed"].items(), key=lambda item: (-item[1], item[0]))
    ]


def write_eval_report(folder: Path) -> Path:
    """Write ``report.html`` of an evaluation and return its path: scores, and questions with answers and verdicts.

    An inline script filters the questions.

    Raises:
        DataError: The folder has no valid ``eval.json``.
    """
    record = read_record(folder / "eval.json", {"model": dict, "tasks": dict, "groups": dict}, remedy="evaluate again")
    samples: dict[str, list[dict[str, Any]]] = {}
    shown = max(1, min(MAX_QUESTIONS, MAX_SHOWN // max(1, len(record["tasks"]))))
    for row in read_lines(folder / "samples.jsonl"):
        if row is not None and len(rows := samples.setdefault(str(row["task"]), [])) < shown:
            # Not those of choices, which are log-probabilities.
            answers = [answer[:MAX_TEXT] if isinstance(answer, str) else answer for answer in row["answers"]]
            prompt, target = row["prompt"][-MAX_TEXT:], str(row["target"])[:MAX_TEXT]
            changed = {"prompt": prompt, "answers": answers, "target": target, "verdict": classify_answer(row)}
            rows.append(row | changed)
    return write_page(folder / "report.html", "eval", record=record, samples=samples, shown=shown)


def classify_answer(row: Record) -> str:
    """Return ``right`` or ``wrong`` from the first score of a question that is 0 or 1; empty if there is none."""
    verdict = next((value for value in row["scores"].values() if value in (0, 1)), None)
    return "" if verdict is None else "right" if verdict else "wrong"


def write_score_report(scored: Path, column: str) -> Path:
    """Write a page beside a file of scored rows and return its path: quantiles, histogram, rows of extreme losses.

    Only the texts of the extreme rows are kept in memory.

    Args:
        scored: JSON Lines file from ``recipes score``.
        column: Column of the losses, in nats per target token.
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
            # A heap of fixed size, whose smallest item is dropped.
            change = heapq.heappush if len(heap) < NUM_EXTREMES else heapq.heappushpop
            change(heap, (key, number, text))
    statistics: dict[str, Any] = {}
    if losses:
        counts, edges = np.histogram(losses, bins=_NUM_BARS)
        quantiles = np.quantile(losses, _QUANTILES)
        statistics = {
            "bars": counts.tolist(),
            "edges": [edges[0], edges[-1]],
            "quantiles": {f"{share:.0%}": value for share, value in zip(_QUANTILES, quantiles, strict=True)},
            "extremes": {
                "Highest loss": sorted(highest, reverse=True),
                "Lowest loss": [(-loss, number, text) for loss, number, text in sorted(lowest, reverse=True)],
            },
        }
    path = scored.with_name(f"{scored.name}.html")
    return write_page(path, "scores", name=scored.name, column=column, losses=losses, num_empty=num_empty, **statistics)


def write_synthesis_report(folder: Path, record: Record, samples: Mapping[str, Sequence[Record]]) -> Path:
    """Write ``report.html`` of synthetic data and return its path: counts, removals, and samples of both.

    Args:
        folder: Output folder of the rows.
        record: Contents of ``synthesis.json``.
        samples: Sample rows: ``kept``, and removed replies by reason.
    """
    shown = {kind: [_show_row(row) for row in rows] for kind, rows in samples.items()}
    return write_page(
        folder / "report.html",
        "synthesis",
        name=folder.resolve().name,
        record=record,
        kept=shown.pop("kept"),
        removed=shown,
    )


def _show_row(row: Mapping[str, Any]) -> str:
    """Return a row as readable, truncated text: chat turns with their role, other columns with their name."""
    parts = []
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
            # Both spellings of a chat: OpenAI's `role` and `content`, ShareGPT's `from` and `value`.
            turns = ((turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in value)
            parts += [f"[{role}] {content}" for role, content in turns]
        else:
            parts.append(f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}")
    return "\n".join(parts)[:MAX_TEXT]

"""``recipes runs`` and ``index.html`` of a pipeline or a folder of runs: status, step, metrics and links."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.errors import ConfigError, DataError, Problem, escape_controls
from recipes_lib.files import is_inside, is_locked, read_record
from recipes_lib.quantities import format_duration, pluralize
from recipes_lib.report.html_pages import write_page
from recipes_lib.report.run_files import RunFiles, find_end, mark_killed, read_curve, read_number, read_run

PIPELINE: Final = "pipeline.json"
_SIGNS: Final = ("run.json", "metrics.jsonl", "corpus.json", "eval.json")
"""Files that identify a folder as an output directory."""
_FIGURES: Final = (
    *("eval_reward", "objective/score", "eval_rewards/accuracies", "eval_bits_per_byte", "eval_loss"),
    *("on_policy/divergence", "loss"),
)
"""Result metrics in order of preference: a surrogate loss of RL has no meaning, pairs have accuracies, and the loss of
on-policy distillation is that of texts in one step and of answers in another."""
_CURVES: Final = ("objective/score", "on_policy/divergence", "loss")
_MAX_DEPTH: Final = 4
_SPARK: Final = (120, 28)
_MAX_SPARK_POINTS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Output of a run, a corpus, an evaluation or another stage of a pipeline.

    Attributes:
        name: Name of the stage, or path relative to the listed folder.
        path: File or folder.
        kind: Recipe; empty if unknown.
        status: Recorded status, such as ``done``; ``killed`` for a running one whose lock is free; ``not run`` for a
            stage without a record.
        step: Number of optimizer steps; ``None`` for an output without training.
        figure: Name of the result metric; empty without one.
        before: First value of the metric; ``None`` if there is only one.
        after: Last value of the metric; ``None`` without one.
        seconds: Duration; ``None`` if unknown.
        cost: Price of the training time on all devices; ``None`` without ``device_hour_price``.
        changed: Time of the last modification, in seconds since the epoch; ``None`` if there are no files.
        curve: Name of the metric of the sparkline; empty without one.
        spark: Points of the sparkline, as returned by ``draw_spark``.
        about: Description of the stage.
    """

    name: str
    path: Path
    kind: str = ""
    status: str = ""
    step: int | None = None
    figure: str = ""
    before: float | None = None
    after: float | None = None
    seconds: float | None = None
    cost: float | None = None
    changed: float | None = None
    curve: str = ""
    spark: str = ""
    about: str = ""


def list_entries(folder: Path) -> list[Entry]:
    """Return the stages of a pipeline in order, or else the outputs below a folder ordered by name.

    Raises:
        DataError: There are no outputs, or the record of the pipeline is invalid.
    """
    if (folder / PIPELINE).is_file():
        remedy = "delete it, and run the pipeline again"
        record = read_record(folder / PIPELINE, {"stages": dict, "pipeline": list}, remedy=remedy)
        stages = [stage for stage in record["pipeline"] if isinstance(stage, dict)]
        states = {name: state for name, state in record["stages"].items() if isinstance(state, dict)}
        return [_describe_stage(folder, stage, states.get(str(stage.get("name")), {})) for stage in stages]
    entries = [describe_output(path, str(path.relative_to(folder))) for path in _find_outputs(folder, _MAX_DEPTH)]
    if not entries:
        remedy = "give a folder that contains output directories of runs"
        raise DataError(Problem(str(folder), "has no run and no pipeline", remedy))
    return entries


def _find_outputs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the outputs below a folder; those nested in another output are skipped."""
    try:
        # Links may form cycles, or list a run twice.
        children = [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
    except OSError:
        return
    for child in sorted(children, key=_split_numbers):
        with suppress(PermissionError):  # The folder of another user, among those of a team.
            if any((child / sign).is_file() for sign in _SIGNS):
                yield child
            elif depth > 1:
                yield from _find_outputs(child, depth - 1)


def _split_numbers(path: Path) -> list[str | int]:
    """Return the name in parts, text and number in turn, so that ``sweep-2`` precedes ``sweep-10``."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split("([0-9]+)", path.name))]


def _describe_stage(folder: Path, stage: Mapping[str, Any], state: Mapping[str, Any]) -> Entry:
    entry = describe_output(folder / str(stage.get("output", "")), str(stage.get("name", "")))
    # The stage's own time includes the start of its processes.
    seconds = read_number(state, "seconds")
    return replace(
        entry,
        kind=str(stage.get("recipe") or entry.kind),
        status=find_stage_status(folder, entry.name, state),
        seconds=entry.seconds if seconds is None else seconds,
        changed=entry.changed if state else None,
        about=str(stage.get("about", "")),
    )


def find_stage_status(folder: Path, name: str, state: Mapping[str, Any]) -> str:
    """Return the recorded status of a stage; ``killed`` for a running one if neither lock of the pipeline is held."""
    status = str(state.get("status", "not run"))
    # Of the whole pipeline, and of a job of this stage. Stages inherit them from `recipes run`, and may outlive it.
    locks = [folder / lock for lock in (f"{PIPELINE}.lock", f"{PIPELINE}.{name}.lock") if is_inside(lock)]
    return "killed" if status == "running" and all(is_locked(lock) is False for lock in locks) else status


def describe_output(path: Path, name: str) -> Entry:
    """Return the entry of an output, complete or not."""
    signs = [file for sign in _SIGNS if (file := path / sign).is_file()]
    # A command's output is often a single file, or a folder without a record.
    changed = [file.stat().st_mtime for file in signs or [path] if file.exists()]
    known: dict[str, Any] = {"name": name, "path": path, "changed": max(changed, default=None)}
    with suppress(DataError):
        run = read_run(path, ("step", "seconds", *_FIGURES))
        return Entry(**known, **summarize(mark_killed(run)))
    kind = "corpus" if (path / "corpus.json").is_file() else "eval" if (path / "eval.json").is_file() else ""
    return Entry(**known, **_find_score(path), kind=kind, status="done" if kind else "")


def _find_score(path: Path) -> dict[str, Any]:
    """Return the ``Entry`` fields of the first benchmark score, preferring groups; empty without a score."""
    with suppress(DataError):
        record = read_record(path / "eval.json", {"model": dict, "tasks": dict, "groups": dict})
        for task, found in [*record["groups"].items(), *record["tasks"].items()]:
            for metric, score in (found.get("scores") or {}).items() if isinstance(found, dict) else ():
                if isinstance(score, dict) and (value := read_number(score, "value")) is not None:
                    return {"figure": f"{record['model'].get('name')}: {task} {metric}", "after": value}
    return {}


def summarize(run: RunFiles) -> dict[str, Any]:
    """Return the ``Entry`` fields of a run: kind, status, step, figure, seconds and sparkline."""
    last = run.train[-1] if run.train else {}
    seconds, price = read_number(last, "seconds"), read_number(run.config, "device_hour_price")
    curves = ((name, read_curve(run.train, name)) for name in _CURVES)
    drawn, points = next((named for named in curves if named[1]), ("", []))
    facts: dict[str, Any] = {
        "kind": str(run.facts.get("stage", "")),
        "status": str(run.facts.get("status", "")),
        "step": last.get("step"),
        "seconds": seconds,
        "cost": seconds / 3600 * (read_number(run.facts, "num_processes") or 1) * price if seconds and price else None,
        # The points only: the curves of hundreds of runs would take gigabytes.
        "spark": draw_spark(points),
        "curve": drawn,
    }
    for name in _FIGURES:
        records = run.held_out if name.startswith("eval_") else run.train
        if (after := find_end(records, name)) is not None:
            curve = read_curve(records, name)
            return {**facts, "figure": name, "before": curve[0][1] if len(curve) > 1 else None, "after": after}
    return facts


def describe_result(run: RunFiles) -> str:
    """Return result and training time of a run: ``eval_loss 5.01 -> 2.14, 600 steps, 2 min 0 s of training``."""
    entry = Entry(name=run.name, path=Path(), **summarize(run))
    parts = [show_figure(entry)] if entry.figure else []
    parts += [pluralize(entry.step, "step")] if entry.step is not None else []
    # Without evaluations and saves, which may take longer.
    parts += [] if entry.seconds is None else [f"{format_duration(entry.seconds)} of training"]
    return ", ".join(parts)


def show_figure(entry: Entry) -> str:
    """Return the result metric as text: ``eval_loss 5.01 -> 2.14``; empty without one."""
    before = "" if entry.before is None else f"{entry.before:.4g} -> "
    return f"{entry.figure} {before}{entry.after:.4g}" if entry.after is not None else ""


def draw_spark(curve: Sequence[tuple[int, float]]) -> str:
    """Return the ``points`` of an SVG polyline of 120 x 28 units; empty for fewer than two points."""
    if len(curve) < 2:
        return ""
    # Rounded up, so that there are at most `_MAX_SPARK_POINTS` points and the last one.
    stride = -(-len(curve) // _MAX_SPARK_POINTS)
    points = [*curve[:-1:stride], curve[-1]]
    (first, last), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high = min(values), max(values)
    width, height = _SPARK
    return " ".join(
        f"{(step - first) / max(1, last - first) * width:.1f},"
        f"{height - 2 - (value - low) / ((high - low) or 1) * (height - 4):.1f}"
        for step, value in points
    )


def write_overview(folder: Path, entries: Sequence[Entry] | None = None) -> Path:
    """Write ``index.html`` of a pipeline or of a folder of runs, and return its path.

    The page works offline; an inline script sorts the table. Names and record values are escaped.

    Args:
        folder: The folder.
        entries: Its outputs; ``None`` for those of ``list_entries``.

    Raises:
        DataError: The folder has no outputs.
    """
    entries = list_entries(folder) if entries is None else entries
    filters = {
        "duration": lambda seconds: "" if seconds is None else format_duration(seconds),
        "when": lambda changed: "" if changed is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(changed)),
        # As bytes: the name of a folder need not be valid UTF-8.
        "link": lambda path: quote(os.fsencode(os.path.relpath(path, folder))),
    }
    return write_page(
        folder / "index.html",
        "overview",
        filters,
        name=folder.resolve().name,
        is_pipeline=(folder / PIPELINE).is_file(),
        entries=entries,
        reports={entry.name: report for entry in entries if (report := entry.path / "report.html").is_file()},
        total=sum(entry.seconds or 0 for entry in entries),
        cost=sum(entry.cost or 0 for entry in entries),
    )


def main(argv: Sequence[str]) -> None:
    """``recipes runs``: list the runs below a folder with status, steps, result and age.

    Raises:
        ConfigError: The folder does not exist.
        DataError: The folder has no runs.
    """
    folder = CommandParser("runs").parse_args(argv).folder or Path("runs" if Path("runs").is_dir() else ".")
    if not folder.is_dir():
        raise ConfigError(Problem(str(folder), "is not a folder", "give a folder that contains runs"))
    rows = [("run", "recipe", "status", "step", "figure", "time", "changed")]
    entries, now = list_entries(folder), time.time()
    for entry in entries:
        age = "" if entry.changed is None else f"{format_duration(max(0.0, now - entry.changed))} ago"
        duration = "" if entry.seconds is None else format_duration(entry.seconds)
        step = "" if entry.step is None else f"{entry.step:,}"
        rows.append((entry.name, entry.kind, entry.status, step, show_figure(entry), duration, age))
    # First, because the folder may not be writable.
    sys.stdout.write("\n".join(format_rows(rows)) + "\n")
    sys.stdout.write(f"{write_overview(folder, entries)}\n")


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as aligned columns; names and statuses are untrusted, so control characters are escaped."""
    rows = [[escape_controls(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

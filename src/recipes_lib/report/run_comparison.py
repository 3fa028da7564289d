"""``recipes report A B --compare``: overlaid curves, answers, and differences of metrics and keys of several runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import explain_write_errors
from recipes_lib.quantities import format_duration, pluralize
from recipes_lib.report.charts import METRICS, Chart, Line, Plan, draw_chart
from recipes_lib.report.html_pages import write_page
from recipes_lib.report.page import MAX_PROMPTS, show_answer, show_prompt
from recipes_lib.report.run_files import RunFiles, find_end, read_curve, read_number, read_run

_COLOURS: Final = ("first", "second", "third", "good")
"""One colour per run; more than four are hard to distinguish."""
_LOSSES: Final = ("eval_loss", "loss")
_OMITTED: Final = ("eval_seconds", "eval_num_", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
_UNIMPORTANT: Final = ("output_dir", "prepared_dir", "run_name")


@dataclass(frozen=True, slots=True)
class Row:
    """Values of a metric or key in each run; for a metric also the differences from the first run."""

    name: str
    values: Sequence[str]
    differences: Sequence[str] = ()


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares runs with the first one, and return its path.

    The page works offline without scripts; all text from data or configuration is escaped.

    Args:
        folders: Output directories, two to four.
        path: Path of the page, or a folder for ``compare.html``: an existing one, or a name without suffix. PNGs of the
            charts are written to the folder of the page's name without suffix.

    Raises:
        ConfigError: There are fewer than two or more than four folders, or the page cannot be written.
        DataError: A folder has no run.
    """
    if not 2 <= len(folders) <= len(_COLOURS):
        found = f"{pluralize(len(folders), 'run')} cannot be compared"
        raise ConfigError(Problem("--compare", found, f"name 2 to {len(_COLOURS)} runs"))
    # By the path as given: runs in different folders may have the same name.
    runs = {str(folder): read_run(folder) for folder in folders}
    if len(runs) < len(folders):
        raise ConfigError(Problem("--compare", "a run is named twice", "name each once"))
    recipes = {str(run.facts.get("stage", "unknown recipe")) for run in runs.values()}
    if path.is_dir() or not path.suffix:
        path /= "compare.html"
    images = path.with_suffix("")
    with explain_write_errors(path, "name another --output"):
        images.mkdir(parents=True, exist_ok=True)
        return write_page(
            path,
            "compare",
            names=list(runs),
            colours=_COLOURS,
            recipes=sorted(recipes),
            charts=draw_overlays(runs, images, is_one_recipe=len(recipes) == 1),
            figures=compare_figures(list(runs.values()), is_one_recipe=len(recipes) == 1),
            keys=compare_keys(list(runs.values())),
            is_recorded=all(run.config for run in runs.values()),
            samples=pair_answers(runs),
            samples_lead="Prompts that all runs answered, with the last answers; those with different answers first.",
        )


def draw_overlays(runs: dict[str, RunFiles], folder: Path, *, is_one_recipe: bool) -> list[Chart]:
    """Draw one chart per figure, with a curve for each run.

    Args:
        runs: Name -> run.
        folder: Existing folder for the PNGs.
        is_one_recipe: Whether all runs have the same recipe; losses of different recipes are not comparable.
    """
    charts = []
    for name, unit, kind in METRICS["compared"]:
        if not is_one_recipe and name in _LOSSES:
            continue
        lines = [
            Line(label, read_curve(run.evaluations if name.startswith("eval_") else run.train, name), colour, kind)
            for (label, run), colour in zip(runs.items(), _COLOURS, strict=False)
        ]
        if any(line.curve for line in lines):
            # The page has the legend: names of folders are long.
            charts.append(draw_chart(Plan(name.replace("/", "_"), name, lines, unit, has_legend=False), folder))
    return charts


def pair_answers(runs: Mapping[str, RunFiles]) -> list[dict[str, Any]]:
    """Return prompts that all runs answered, each with the last answer of every run; at most ``MAX_PROMPTS``.

    Args:
        runs: Name -> run; rewards are compared with those of the first.
    """
    # Ordered by step: the last answer to a prompt remains.
    last = [{str(sample.get("prompt", "")): sample for sample in run.samples} for run in runs.values()]
    rows = [[answers[prompt] for answers in last] for prompt in last[0] if all(prompt in answers for answers in last)]
    rows.sort(key=lambda row: len({str(answer["completion"]) for answer in row}) == 1)
    return [
        show_prompt(
            row[0],
            [
                show_answer(answer, [answer["step"]], row[0]) | {"when": name}
                for name, answer in zip(runs, row, strict=True)
            ],
        )
        for row in rows[:MAX_PROMPTS]
    ]


def compare_figures(runs: Sequence[RunFiles], *, is_one_recipe: bool) -> list[Row]:
    """Return the final metrics of each run: held-out metrics, training loss, steps, tokens, time and memory.

    Args:
        runs: The runs; differences are relative to the first.
        is_one_recipe: Whether all runs have the same recipe; losses of different recipes are not comparable.
    """
    recorded = {name for run in runs for record in run.evaluations for name in record}
    names = [name for name in sorted(recorded) if name.startswith("eval_") and not name.startswith(_OMITTED)]
    rows = []
    for name in (*names, "objective/score", "on_policy/divergence", "loss"):
        if not is_one_recipe and name in _LOSSES:
            continue
        places = (run.held_out if name.startswith("eval_") else run.train for run in runs)
        rows.append(_build_row(name, [find_end(records, name) for records in places]))
    last = [run.train[-1] if run.train else {} for run in runs]
    rows.append(_build_row("steps", [read_number(event, "step") for event in last]))
    rows.append(_build_row("tokens", [read_number(event, "num_tokens") for event in last]))
    seconds = [read_number(event, "seconds") for event in last]
    rows.append(Row("training time", ["" if value is None else format_duration(value) for value in seconds]))
    memory = [max((value for _, value in read_curve(run.train, "memory_bytes")), default=None) for run in runs]
    rows.append(_build_row("peak memory, GB", [None if value is None else value / 1e9 for value in memory]))
    return [row for row in rows if any(row.values)]


def _build_row(name: str, values: Sequence[float | None]) -> Row:
    base = values[0]
    differences = [
        ""
        if value is None or base is None or not math.isfinite(value - base)
        else "="
        if value == base
        # A relative difference is defined for a positive base only.
        else _show(value - base, "+", 4) + (f" ({value / base - 1:+.1%})" if base > 0 else "")
        for value in values[1:]
    ]
    return Row(name, ["" if value is None else _show(value, "", 5) for value in values], differences)


def _show(value: float, sign: str, digits: int) -> str:
    # Large numbers are counts and shown exactly.
    return format(value, f"{sign},.0f" if abs(value) >= 1e4 else f"{sign}.{digits}g")


def compare_keys(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the keys with different values, except those that never affect results."""
    configs = [run.config for run in runs]
    names = sorted({name for config in configs for name in config} - set(_UNIMPORTANT))
    rows = [
        Row(name, [json.dumps(config[name], ensure_ascii=False) if name in config else "" for config in configs])
        for name in names
    ]
    facts = {"stage": "recipe", "num_processes": "processes", "rows_per_step": "rows per step", "git_commit": "commit"}
    rows += [Row(title, [str(run.facts.get(name, "")) for run in runs]) for name, title in facts.items()]
    return [row for row in rows if len(set(row.values)) > 1]

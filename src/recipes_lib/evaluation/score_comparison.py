"""Paired comparison of models on the same questions: differences, confidence intervals, verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from recipes_lib.evaluation.harness import RECORD, read_samples
from recipes_lib.evaluation.intervals import compute_interval
from recipes_lib.files import read_record

Verdict = Literal["better", "worse", "same", "not comparable"]


class Difference(NamedTuple):
    """A score of two models on the questions that both were asked.

    Attributes:
        task: Its name, or that of a group of tasks.
        metric: With the filter that chose the answer, if one did.
        model: The model that is compared; its folder of scores where two have one name.
        num_questions: Those that both were asked, by the same prompts.
        base: Mean of the first evaluation.
        other: Mean of this one.
        low: Lower end of the 95 % confidence interval of the mean difference.
        high: Upper end.
        verdict: ``better`` or ``worse`` where the interval leaves out 0, by the metric's direction; ``same`` where it
            does not: no difference was shown. ``not comparable`` where the prompts differ.
    """

    task: str
    metric: str
    model: str
    num_questions: int
    base: float
    other: float
    low: float
    high: float
    verdict: Verdict

    def describe(self) -> dict[str, Any]:
        """Return it as JSON has it: an end of the interval that is nowhere is ``None``."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self._asdict().items()
        }


_Scores = dict[tuple[str, str], dict[str, tuple[str, float]]]
"""Task and metric -> question -> hash of the prompt, and score."""


def compare_folders(folders: Sequence[Path]) -> list[Difference]:
    """Compare each evaluation with the first one, on groups, tasks and metrics that both have.

    Raises:
        DataError: A folder holds no evaluation, or one that cannot be read.
    """
    base, *others = map(_read_scores, folders)
    records = [read_record(folder / RECORD, {"tasks": dict, "groups": dict}) for folder in folders]
    labels = [record.get("model", {}).get("name") for record in records]
    if len({*labels, None}) <= len(labels):  # One of them has no name, or that of another.
        labels = [str(folder) for folder in folders]
    rows = []
    for label, other, record in zip(labels[1:], others, records[1:], strict=True):
        for name, found in _list_compared(*records[:1], record):
            members = found.get("tasks", [name])
            for metric in dict.fromkeys(metric for task, metric in base if task in members):
                pairs = [(base.get((task, metric)), other.get((task, metric))) for task in members]
                # Of a group, every member or none: a mean over fewer tasks would be another score.
                if all(one and two for one, two in pairs):
                    rises = record["tasks"].get(members[0], {}).get("higher_is_better", {})
                    # Without a direction, more is better.
                    falls = rises.get(metric.partition(",")[0]) is False
                    is_mean = not found.get("is_weighted_by_size", True)
                    rows.append(_compare(name, metric, label, pairs, falls=falls, is_mean_of_tasks=is_mean))
    return rows


def _list_compared(*records: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Groups that have the same members in both, and then tasks."""
    first, second = records
    for name, found in first["groups"].items():
        if name in second["groups"] and found.get("tasks") == second["groups"][name].get("tasks"):
            yield name, found
    yield from ((name, {}) for name in first["tasks"])


def _read_scores(folder: Path) -> _Scores:
    found: _Scores = {}
    for row in read_samples(folder):
        for metric, value in row["scores"].items():
            if isinstance(value, int | float):
                label = metric if row["filter"] == "none" else f"{metric}, {row['filter']}"
                # By content besides its number: another version of the data has other questions under these numbers.
                question = f"{row['doc_id']} {row['doc_hash']}"
                found.setdefault((row["task"], label), {})[question] = (row["prompt_hash"], float(value))
    return found


def _compare(
    name: str, metric: str, model: str, pairs: Sequence[Any], *, falls: bool, is_mean_of_tasks: bool
) -> Difference:
    values = []
    for one, two in pairs:
        # Asked by the same prompt.
        both = [(one[asked], two[asked]) for asked in one if asked in two and one[asked][0] == two[asked][0]]
        values.append(np.array([(first, second) for (_, first), (_, second) in both]))
    if not all(map(len, values)):
        nothing = float("nan")
        return Difference(name, metric, model, 0, nothing, nothing, nothing, nothing, "not comparable")
    number = sum(map(len, values))
    # The mean of tasks, where a group's score is that and not the mean of all questions.
    scales = [number / len(values) / len(task) if is_mean_of_tasks else 1.0 for task in values]
    scaled = np.concatenate([task * scale for task, scale in zip(values, scales, strict=True)])
    low, high = compute_interval(scaled[:, 1] - scaled[:, 0])
    verdict: Verdict = "same"
    if low > 0 or high < 0:
        verdict = "better" if (low > 0) != falls else "worse"
    means = scaled.mean(axis=0)
    return Difference(name, metric, model, number, float(means[0]), float(means[1]), low, high, verdict)


def format_rows(rows: Sequence[Difference]) -> Iterator[str]:
    """Yield a table as text, a line for each difference."""
    yield f"{'task':24}{'metric':22}{'base':>8}{'other':>8}{'difference':>12}  {'95 % interval':20}{'n':>7}  verdict"
    for row in rows:
        interval = f"{row.low:+.4f} .. {row.high:+.4f}"
        figures = f"{row.base:8.4f}{row.other:8.4f}{row.other - row.base:+12.4f}  {interval:20}{row.num_questions:7,}"
        yield f"{row.task:24}{row.metric:22}{figures}  {row.verdict}: {Path(row.model)}"
    if not rows:
        yield "no task and metric that both have"
    if any(row.verdict == "not comparable" for row in rows):
        yield "not comparable: asked by other prompts (examples, template or version of the task)"

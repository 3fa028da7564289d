"""Paired comparison of models on the same questions: differences, confidence intervals, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from recipes_lib.errors import DataError, Problem
from recipes_lib.evaluation.harness import RECORD, read_samples
from recipes_lib.evaluation.intervals import compute_interval
from recipes_lib.files import read_record

Verdict = Literal["better", "worse", "same", "not comparable"]


class Difference(NamedTuple):
    """Scores of two models on the questions that both have answered.

    Attributes:
        task: Name of a task or of a group of tasks.
        metric: Metric, with the filter that selected the answer, if any.
        model: Name of the compared model, or the folder of its scores if names are missing or equal.
        num_questions: Questions that both models were asked, with the same prompts.
        base: Mean score of the first evaluation.
        other: Mean score of the compared model.
        low: Lower end of the 95 % confidence interval of the mean difference.
        high: Upper end of this interval.
        verdict: ``better`` or ``worse``, by the metric's direction, if the interval excludes 0; ``same`` if no
            difference was shown; ``not comparable`` if the prompts differ, or a score is NaN.
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
        """Return the fields as JSON values; non-finite numbers are ``None``."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self._asdict().items()
        }


_Scores = dict[tuple[str, str], dict[str, tuple[str, float, float]]]
"""Task and metric -> question -> hash of its prompt, score, and weight in the mean."""
_LOGARITHMS: Final = {name: f"log {name}" for name in ("perplexity", "word_perplexity", "byte_perplexity")}
_NATS: Final = {**dict.fromkeys(_LOGARITHMS, 1.0), "bits_per_byte": math.log(2)}
"""Metrics of whose questions lm-eval records the log-likelihood, or it and a number of words or bytes -> nats per unit.

Their means are logarithms of perplexities, or bits per byte.
"""


def compare_folders(folders: Sequence[Path]) -> list[Difference]:
    """Compare each evaluation with the first one, on the groups, tasks and metrics that both have.

    Raises:
        DataError: A folder contains no evaluation, or an invalid one.
    """
    # First: a run, too, has a file of samples.
    remedy = "name the output folders of `recipes eval`"
    records = [read_record(folder / RECORD, {"tasks": dict, "groups": dict}, remedy=remedy) for folder in folders]
    try:
        return list(_compare_all(folders, records))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The evaluation of another user may hold anything.
        found = f"one holds other values than an evaluation: {type(error).__name__}: {error}"
        raise DataError(Problem(", ".join(map(str, folders)), found, remedy)) from error


def _compare_all(folders: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    base, *others = map(_read_scores, folders)
    labels = [record.get("model", {}).get("name") for record in records]
    if len({*labels, None}) <= len(labels):  # A name is missing, or two are equal.
        labels = list(folders)
    metrics = dict.fromkeys(metric for _, metric in base)
    for label, other, record in zip(labels[1:], others, records[1:], strict=True):
        for name, group in _list_compared(records[0], record):
            members = group.get("tasks", [name])
            for metric in metrics:
                pairs = [(base.get((task, metric)), other.get((task, metric))) for task in members]
                # A group is compared only if both have all members: a mean over fewer tasks is a different score.
                if all(one and two for one, two in pairs):
                    higher_is_better = record["tasks"].get(members[0], {}).get("higher_is_better", {})
                    # By default, higher is better.
                    falls = higher_is_better.get(metric.partition(",")[0].removeprefix("log ")) is False
                    is_mean = not group.get("is_weighted_by_size", True)
                    yield _compare(name, metric, str(label), pairs, falls=falls, is_mean_of_tasks=is_mean)


def _list_compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and record of the groups with the same members in both evaluations, then of the first one's tasks."""
    for name, found in first["groups"].items():
        if name in second["groups"] and found.get("tasks") == second["groups"][name].get("tasks"):
            yield name, found
    yield from ((name, {}) for name in first["tasks"])


def _read_scores(folder: Path) -> _Scores:
    found: _Scores = {}
    for row in read_samples(folder):
        for metric, value in row["scores"].items():
            weight = 1.0
            if metric in _NATS:
                value, weight = value if isinstance(value, list) else (value, 1.0)
                value /= -_NATS[metric]
            if isinstance(value, int | float):
                shown = _LOGARITHMS.get(metric, metric)
                label = shown if row["filter"] == "none" else f"{shown}, {row['filter']}"
                # With a hash of the content: another version of the data has different questions of the same number.
                question = f"{row['doc_id']} {row['doc_hash']}"
                found.setdefault((row["task"], label), {})[question] = (row["prompt_hash"], float(value), weight)
    return found


def _compare(
    name: str, metric: str, model: str, pairs: Sequence[Any], *, falls: bool, is_mean_of_tasks: bool
) -> Difference:
    """Compare one metric of a task or group.

    Args:
        name: Name of the task or group.
        metric: Name of the metric.
        model: Name of the compared model.
        pairs: For each task, the base's and the other's questions, as in ``_Scores``.
        falls: Whether a lower score is better.
        is_mean_of_tasks: Whether a group's score is the mean of its tasks instead of the mean of all questions.
    """
    values = []  # For each task, the scores and weights (N, 3) of questions with equal prompts.
    for one, two in pairs:
        both = [(one[key], two[key]) for key in one if key in two and one[key][0] == two[key][0]]
        values.append(np.array([(first, second, weight) for (_, first, weight), (_, second, _) in both]))
    if not all(map(len, values)):
        nan = float("nan")
        return Difference(name, metric, model, 0, nan, nan, nan, nan, "not comparable")
    number = sum(map(len, values))
    # With these weights, the mean of all questions is the mean of the tasks' means.
    scales = [number / len(values) / len(task) if is_mean_of_tasks else 1.0 for task in values]
    scaled = np.concatenate(
        [task[:, :2] * scale / task[:, 2].mean() for task, scale in zip(values, scales, strict=True)]
    )
    differences = scaled[:, 1] - scaled[:, 0]
    low, high = compute_interval(differences)
    verdict: Verdict = "not comparable" if math.isnan(differences.mean()) else "same"
    if low > 0 or high < 0:
        verdict = "better" if (low > 0) != falls else "worse"
    means = scaled.mean(axis=0)
    return Difference(name, metric, model, number, float(means[0]), float(means[1]), low, high, verdict)


def format_rows(rows: Sequence[Difference]) -> Iterator[str]:
    """Yield the lines of a table with a row for each difference."""
    columns = zip(("task", "metric"), *(row[:2] for row in rows), strict=True)
    task, metric = (max(map(len, column)) + 2 for column in columns)
    yield f"{'task':{task}}{'metric':{metric}}    base   other  difference  {'95 % interval':20}      n  verdict"
    for row in rows:
        interval = f"{row.low:+.4f} .. {row.high:+.4f}"
        figures = f"{row.base:8.4f}{row.other:8.4f}{row.other - row.base:+12.4f}  {interval:20}{row.num_questions:7,}"
        yield f"{row.task:{task}}{row.metric:{metric}}{figures}  {row.verdict}: {Path(row.model)}"
    if not rows:
        yield "no task and metric that both have"
    if any(row.verdict == "not comparable" for row in rows):
        yield "not comparable: the prompts differ (few-shot examples, template, version of the task), or a score is NaN"

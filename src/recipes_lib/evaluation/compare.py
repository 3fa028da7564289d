"""Models compared on the same questions: differences in pairs, their confidence intervals, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from recipes_lib.evaluation.harness import RECORD, read_samples
from recipes_lib.files import read_record

Verdict = Literal["better", "worse", "same", "not comparable"]
NUM_RESAMPLES: Final = 2000
_SEED: Final = 0


class Difference(NamedTuple):
    """A score of two models on the questions that both were asked.

    Attributes:
        task: Its name.
        metric: With the filter that chose the answer, if one did.
        model: Folder of the evaluation that is compared.
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


_Scores = dict[tuple[str, str], dict[str, tuple[str, float]]]
"""Task and metric -> question -> hash of the prompt, and score."""


def compare_folders(folders: Sequence[Path]) -> list[Difference]:
    """Compare each evaluation with the first one, on tasks and metrics that both have.

    Raises:
        DataError: A folder holds no evaluation, or one that cannot be read.
    """
    base, *others = map(_read_scores, folders)
    rows = []
    for folder, other in zip(folders[1:], others, strict=True):
        directions = read_record(folder / RECORD, {"tasks": dict})["tasks"]
        for (task, metric), scores in base.items():
            if (task, metric) in other:
                falls = directions.get(task, {}).get("higher_is_better", {}).get(metric.partition(",")[0]) is False
                rows.append(_compare(task, metric, str(folder), scores, other[task, metric], falls=falls))
    return rows


def _read_scores(folder: Path) -> _Scores:
    found: _Scores = {}
    for row in read_samples(folder):
        for metric, value in row["scores"].items():
            if isinstance(value, int | float):
                label = metric if row["filter"] == "none" else f"{metric}, {row['filter']}"
                question = f"{row['doc_id']} {row['doc_hash']}"
                found.setdefault((row["task"], label), {})[question] = (row["prompt_hash"], float(value))
    return found


def _compare(
    task: str,
    metric: str,
    model: str,
    base: Mapping[str, tuple[str, float]],
    other: Mapping[str, tuple[str, float]],
    *,
    falls: bool,
) -> Difference:
    shared = [question for question in base if question in other and base[question][0] == other[question][0]]
    if not shared:
        nothing = float("nan")
        return Difference(task, metric, model, 0, nothing, nothing, nothing, nothing, "not comparable")
    pairs = np.array([(base[question][1], other[question][1]) for question in shared])
    low, high = compute_interval(pairs[:, 1] - pairs[:, 0])
    verdict: Verdict = "same"
    if low > 0 or high < 0:
        verdict = "better" if (low > 0) != falls else "worse"
    means = pairs.mean(axis=0)
    return Difference(task, metric, model, len(shared), float(means[0]), float(means[1]), low, high, verdict)


def compute_interval(differences: Any) -> tuple[float, float]:
    """Return the 95 % interval of a mean by the percentile bootstrap over questions; of one question all numbers.

    Args:
        differences: ``(N,)``, a difference for each question.

    Source: Efron 1979; its coverage in ``tests/evaluation/test_compare.py``.
    """
    number = len(differences)
    if number < 2:
        return -np.inf, np.inf
    draw = np.random.default_rng(_SEED)
    # A resample at a time: of 14,000 questions all of them at once would take gigabytes.
    means = [differences[draw.integers(0, number, number)].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


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

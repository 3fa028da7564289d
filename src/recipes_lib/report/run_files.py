"""Reads the files of a run's output directory, tolerating missing, truncated and untrusted ones."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from recipes_lib.errors import DataError, Problem
from recipes_lib.files import LOCK_FILE, find_record, is_locked, parse_number, read_lines

Record = Mapping[str, Any]
Curve = Sequence[tuple[int, float]]
"""``(step, value)`` points, ordered by step."""
_MAX_SMOOTHED: Final = 400
"""Maximum points of a running median."""
MAX_FINITE: Final = 1e300
"""Sums and axis limits of larger values, which only a broken file has, would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Files of a run's output directory. Its ``repr``, which a notebook prints, has the directory only.

    Attributes:
        name: Name of the directory.
        path: The directory, which also contains the model of a finished run.
        facts: Contents of ``run.json``; empty without a valid one.
        train: Logged training steps, ordered, one record per step.
        evaluations: Evaluations, ordered, one record per step.
        samples: Answers, ordered by step, one record per step and prompt.
        num_torn_lines: Number of lines that are not valid records.
        best: Record of the best checkpoint that was loaded at the end; empty if there was none.
        expected: Bands of ``expected_curve``, ordered, one record per step.
    """

    name: str
    path: Path = Path()
    facts: Record = field(repr=False)
    train: Sequence[Record] = field(repr=False)
    evaluations: Sequence[Record] = field(repr=False)
    samples: Sequence[Record] = field(repr=False)
    num_torn_lines: int = field(repr=False)
    best: Record = field(default_factory=dict, repr=False)
    expected: Sequence[Record] = field(default=(), repr=False)

    @property
    def config(self) -> Record:
        """Configuration, key -> value; empty if it was not recorded."""
        config = self.facts.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def held_out(self) -> list[Record]:
        """Evaluations up to the weights of the final model, which may be those of an earlier, best checkpoint."""
        last = parse_number(self.best.get("best_step"))
        return [event for event in self.evaluations if last is None or event["step"] <= last]

    def find_figures(self, step: float | None = None) -> dict[str, float]:
        """Return the metrics ``eval_...`` of the last evaluation, of the final model or up to ``step``."""
        known = self.held_out if step is None else [event for event in self.evaluations if event["step"] <= step]
        numbers = {name: parse_number(value) for name, value in (known or [{}])[-1].items() if name.startswith("eval_")}
        return {name: number for name, number in numbers.items() if number is not None}

    @property
    def metrics(self) -> list[Record]:
        """All logged steps and evaluations, ordered by step, suitable for ``pandas.DataFrame``."""
        return sorted([*self.train, *self.evaluations], key=lambda event: int(event["step"]))


def is_run(folder: Path) -> bool:
    """Return whether a folder is the output directory of a run."""
    return any((folder / name).is_file() for name in ("run.json", "metrics.jsonl"))


def read_run(run_dir: Path, names: Collection[str] | None = None) -> RunFiles:
    """Read ``run.json``, ``metrics.jsonl`` and ``samples.jsonl`` of a run directory.

    Args:
        run_dir: The directory.
        names: Values of training steps to keep in memory, and then without samples; ``None`` to keep all.

    Raises:
        DataError: The directory has neither ``run.json`` nor ``metrics.jsonl``.
    """
    if not is_run(run_dir):
        found = "has neither run.json nor metrics.jsonl"
        raise DataError(Problem(str(run_dir), found, "give the output_dir of a run"))
    events, torn_events = _split_valid(read_lines(run_dir / "metrics.jsonl"), names)
    samples, torn_samples = _split_valid(read_lines(run_dir / "samples.jsonl") if names is None else ())
    train, evaluations, expected = (
        _keep_last([event for event in events if event.get("kind") == kind], "step")
        for kind in ("train", "eval", "expected")
    )
    return RunFiles(
        name=run_dir.resolve().name,
        path=run_dir,
        facts=find_record(run_dir / "run.json"),
        train=train,
        evaluations=evaluations,
        samples=_keep_last([sample for sample in samples if "completion" in sample], "step", "prompt"),
        num_torn_lines=torn_events + torn_samples,
        best=next((event for event in reversed(events) if event.get("kind") == "best"), {}),
        expected=expected,
    )


def mark_killed(run: RunFiles) -> RunFiles:
    """Return a run with the status ``killed`` if it is recorded as ``running`` and no process holds its lock.

    The process of the run itself must not ask, as for ``is_locked``.
    """
    is_killed = run.facts.get("status") == "running" and is_locked(run.path / LOCK_FILE, of_process=True) is False
    return replace(run, facts={**run.facts, "status": "killed"}) if is_killed else run


class Score(NamedTuple):
    """A benchmark score with standard error, dataset, description of prompts, and whether all questions were used."""

    task: str
    metric: str
    value: float
    stderr: float | None
    dataset: str
    about: str
    is_whole: bool


def list_scores(facts: Record) -> Iterator[Score]:
    """Yield the benchmark scores in ``run.json``; tasks of a group are represented by the group's score.

    Invalid fields of an untrusted record are skipped.
    """
    tasks = facts.get("scores")
    for task, found in tasks.items() if isinstance(tasks, Mapping) else ():
        scores = found.get("scores") if isinstance(found, Mapping) and not found.get("group") else None
        for metric, score in scores.items() if isinstance(scores, Mapping) else ():
            if isinstance(score, Mapping) and (value := read_number(score, "value")) is not None:
                is_whole = found.get("limit") is None
                about = f"{found.get('num_fewshot')}-shot, {found.get('num_questions')} questions"
                about += "" if is_whole else f", the first {found['limit']} of each task"
                place = str(found.get("dataset") or task)
                yield Score(task, metric, value, read_number(score, "stderr"), place, about, is_whole)


def read_number(record: Record, name: str) -> float | None:
    """Return a number of a record, NaN and infinities included; ``None`` if it is missing or not a number."""
    number = parse_number(record.get(name))
    try:
        return None if number is None else float(number)
    except OverflowError:  # JSON integers are unbounded.
        return math.inf


def read_curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return the ``(step, value)`` pairs of a metric whose value is finite and below ``MAX_FINITE`` in magnitude."""
    return [(step, value) for step, value in _iterate_numbers(records, name) if abs(value) < MAX_FINITE]


def find_end(records: Sequence[Record], name: str) -> float | None:
    """Return the last value of a metric, which may be NaN or infinite; ``None`` if it was never recorded.

    Of a training loss, which is noisy, it is the last running median, unless the run has diverged.
    """
    last = deque(_iterate_numbers(records, name), maxlen=1)
    end = last[0][1] if last else None
    is_noisy = name in ("loss", "on_policy/divergence") and end is not None and abs(end) < MAX_FINITE
    return smooth(read_curve(records, name))[-1][1] if is_noisy else end


def smooth(curve: Curve) -> Curve:
    """Return the running median over a window of a twentieth of the curve, at up to ``_MAX_SMOOTHED`` points.

    Unlike a running mean, a median does not spread a spike over its window. At the beginning, where curves are steep,
    the window is symmetric and shorter.
    """
    # Half a window; 40 halves are 20 windows.
    reach = max(1, len(curve) // 40)
    stride = -(-len(curve) // _MAX_SMOOTHED)
    centres = sorted({*range(0, len(curve), stride), len(curve) - 1})
    # NumPy's median selects instead of sorting: windows of a million steps have 50,000 values.
    values = np.array([value for _, value in curve])
    return [(curve[at][0], float(np.median(values[max(0, at - reach) : at + min(at, reach) + 1]))) for at in centres]


def find_non_finite_steps(records: Sequence[Record], name: str) -> list[int]:
    """Return the steps at which a metric was NaN or infinite."""
    return [step for step, value in _iterate_numbers(records, name) if not math.isfinite(value)]


def _iterate_numbers(records: Sequence[Record], name: str) -> Iterator[tuple[int, float]]:
    for record in records:
        value = record.get(name)
        # Floats first: nearly all values of a run, which may have a million steps, are floats or absent.
        if type(value) is float or (value is not None and (value := read_number(record, name)) is not None):
            yield record["step"], value


def _split_valid(
    lines: Iterable[dict[str, Any] | None], names: Collection[str] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the valid records, those of training steps with the values ``names`` only, and the number of others."""
    records, num_torn = list[dict[str, Any]](), 0
    for record in lines:
        # A step above 2**53 is invalid, and not exact as a float of a chart.
        if not record or type(step := record.get("step")) is not int or abs(step) >= 2**53:
            num_torn += 1
            continue
        if record.get("kind") == "train":
            kept = record if names is None else record.keys() & {"kind", "step", *names}
            # Interned: otherwise each of a million steps has its own names.
            record = {sys.intern(name): record[name] for name in kept}
        records.append(record)
    return records, num_torn


def _keep_last(records: Sequence[Record], *names: str) -> list[Record]:
    """Return the records ordered by step; a later one replaces those equal in ``names``, as after a resume."""
    latest = {tuple(str(record.get(name)) for name in names): record for record in records}
    return sorted(latest.values(), key=lambda record: int(record["step"]))

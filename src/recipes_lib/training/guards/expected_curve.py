"""Expected curve: warns when the loss of a pretraining run leaves the band that ``recipes scale predict`` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerState

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record
from recipes_lib.planning.scaling import ExpectedCurve, average_recent
from recipes_lib.training.monitoring.metrics import MetricsWriter
from recipes_lib.training.monitoring.progress import TrainingProgress

_TOLERANCE = 0.02
"""Relative difference of tokens between run and curve, such as by rounding to whole steps."""


class ExpectedCurveMonitor(TrainerCallback):
    """Compares each logged loss with the expected curve, and reports when it leaves the band or returns.

    The band is logged then, and beside one loss in each percent of the run, for the chart of the report.

    Source: ``tests/training/guards/test_expected_curve.py``.
    """

    def __init__(self, curve: ExpectedCurve, writer: MetricsWriter, progress: TrainingProgress) -> None:
        """Initialise within the band.

        Args:
            curve: The expected curve.
            writer: Writer of ``metrics.jsonl``.
            progress: Progress display.
        """
        self._curve, self._writer, self._progress = curve, writer, progress
        self._side, self._percent = "", -1

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Compare the loss; a training loss is averaged over the last 5 % of the run, from the logged history."""
        metric, share = self._curve.metric, state.global_step / state.max_steps
        if metric not in logs or (band := self._curve.find_band(share)) is None:
            return
        loss = logs[metric]
        if metric == "loss":
            # From the end: a million logged steps are not read again at each.
            events = (
                (event["step"] / state.max_steps, event["loss"])
                for event in reversed(state.log_history)
                if "loss" in event
            )
            loss = average_recent(events, share)
        side = "below" if loss < band[0] else "" if loss <= band[1] else "above"  # NaN is above.
        percent = int(100 * share)
        if side != self._side or percent != self._percent:
            self._percent = percent
            self._writer.write(
                {"kind": "expected", "step": state.global_step, metric: loss, "low": band[0], "high": band[1]}
            )
        if side != self._side:
            self._side = side
            place = f"is {side} the expected" if side else "is within the expected"
            line = f"{metric} {loss:.4g} {place} {band[0]:.4g} to {band[1]:.4g}"
            self._progress.say(f"step {state.global_step}: {line} (expected_curve)")


def verify_expected_curve(config: RecipeConfig, num_tokens: int, *, has_eval: bool) -> None:
    """Verify that the curve of ``expected_curve``, if it is set, belongs to a run of this length.

    Args:
        config: The run.
        num_tokens: Training tokens of the run.
        has_eval: Whether the run has held-out rows.

    Raises:
        ConfigError: The curve is that of a run with another number of tokens, or of losses that the run does not log.
        DataError: The file has no curve.
    """
    if (path := config.pretraining.expected_curve) is None:
        return
    curve, expected = _read_expected_curve(Path(path))
    where = config.locate("expected_curve")
    if abs(num_tokens / expected - 1) > _TOLERANCE:
        found = f"{path} is the curve of {expected:,.0f} tokens, and this run has {num_tokens:,}"
        remedy = "predict this run: `recipes scale predict --config FILE --fit scaling.json --output curve.json`"
        raise ConfigError(Problem(where, found, remedy))
    if curve.metric == "eval_loss" and not (has_eval and config.read("eval_strategy") != "no"):
        found = f"{path} is a curve of held-out losses, and this run is not evaluated"
        raise ConfigError(Problem(where, found, "write `eval_strategy: steps`, and name held-out data"))


def expect_loss(config: RecipeConfig) -> dict[str, float]:
    """Return the expected last ``eval_loss`` of ``expected_curve``; empty if it is unset, or of training losses.

    Raises:
        DataError: The file has no curve.
    """
    if (path := config.pretraining.expected_curve) is None:
        return {}
    curve, _ = _read_expected_curve(Path(path))
    return {"eval_loss": curve.losses[-1]} if curve.metric == "eval_loss" else {}


def build_expected_curve(
    config: RecipeConfig, writer: MetricsWriter, progress: TrainingProgress
) -> Iterator[TrainerCallback]:
    """Yield the monitor of ``expected_curve``, if it is set."""
    if (path := config.pretraining.expected_curve) is not None:
        yield ExpectedCurveMonitor(_read_expected_curve(Path(path))[0], writer, progress)


def _read_expected_curve(path: Path) -> tuple[ExpectedCurve, float]:
    """Return an expected curve that ``recipes scale predict`` wrote, and the tokens of its run.

    Raises:
        DataError: The file cannot be read, or has no curve.
    """
    remedy = "write it by `recipes scale predict --output`, with a law of `recipes scale fit`"
    record = read_record(path, {"curve": dict, "num_tokens": int | float}, remedy=remedy)
    try:
        curve = ExpectedCurve(**record["curve"])
        # Fails for other values than numbers, and for lists of different lengths.
        table = np.array([curve.shares, curve.losses, curve.low, curve.high], dtype=np.float64)
        is_curve = table.ndim == 2 and table.size and np.isfinite(table).all() and (np.diff(table[0]) > 0).all()
        if not is_curve or curve.metric not in ("eval_loss", "loss") or not 0 < record["num_tokens"] < np.inf:
            raise ValueError("its metric, shares, losses or tokens are not those of a run")
    except (TypeError, ValueError) as error:
        raise DataError(Problem(str(path), f"`curve` is no loss curve: {error}", remedy)) from error
    return curve, record["num_tokens"]

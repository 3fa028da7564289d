"""``expected_curve``: reports of a run that leaves the band and returns, and files that do not fit the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rows import read_events

from recipes_lib.config.schema import PretrainingConfig
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.planning.scaling import ExpectedCurve
from recipes_lib.training.guards.expected_curve import (
    ExpectedCurveMonitor,
    build_expected_curve,
    expect_loss,
    verify_expected_curve,
)
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter
from recipes_lib.training.monitoring.progress import TrainingProgress

CURVE = {"metric": "eval_loss", "shares": [0.2, 1.0], "losses": [4.0, 2.0], "low": [3.8, 1.8], "high": [4.2, 2.2]}


class Lines(TrainingProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def log_all(folder: Path, metric: str, losses: dict[float, float]) -> list[str]:
    """Log losses by step of 100; return the lines that are shown."""
    progress = Lines()
    writer = MetricsWriter(folder / METRICS_FILE, is_main=True)
    monitor = ExpectedCurveMonitor(ExpectedCurve(**CURVE | {"metric": metric}), writer, progress)
    state = SimpleNamespace(max_steps=100, log_history=[])
    for state.global_step, loss in losses.items():
        monitor.on_log(None, state, None, {"learning_rate": 0.1})
        logs = {metric: loss}
        state.log_history.append(logs | {"step": state.global_step})
        monitor.on_log(None, state, None, logs)
    return progress.lines


def test_leaving_the_band_and_returning_are_reported_once(tmp_path) -> None:
    # The middle of the band is 5 - 3 share of the steps, to within 0.2; before 20 % of the steps there is none.
    losses = {10: 9.0, 20: 4.1, 40: 3.75, 50: 3.9, 60: 2.9, 70: 2.0, 80: 2.5, 90: float("nan")}
    lines = log_all(tmp_path, "eval_loss", losses)
    assert [line.partition(": ")[0] for line in lines] == ["step 40", "step 60", "step 70", "step 80", "step 90"]
    assert lines[0] == "step 40: eval_loss 3.75 is above the expected 3.3 to 3.7 (expected_curve)"
    assert "is within the expected 2.8 to 3.2" in lines[1]
    assert "eval_loss 2 is below the expected" in lines[2]
    assert "nan is above" in lines[4]
    events = read_events(tmp_path, "expected")
    assert [event["step"] for event in events] == [20, 40, 50, 60, 70, 80, 90], "the band is logged inside it too"
    assert events[1] == {"kind": "expected", "step": 40, "eval_loss": 3.75, "low": 3.3, "high": pytest.approx(3.7)}
    (tmp_path / "often").mkdir()
    log_all(tmp_path / "often", "eval_loss", {50.2: 3.5, 50.3: 3.5, 50.9: 3.5, 51.2: 3.5})
    assert [event["step"] for event in read_events(tmp_path / "often", "expected")] == [50.2, 51.2], "once a percent"


def test_training_loss_is_averaged_over_the_last_twentieth(tmp_path) -> None:
    """One noisy step leaves no band; a loss that is averaged away with its neighbours is not reported."""
    assert log_all(tmp_path, "loss", {47: 3.2, 48: 3.3, 49: 3.2, 50: 3.9}) == []
    lines = log_all(tmp_path, "loss", {40: 3.4, 50: 3.9})
    assert lines == ["step 50: loss 3.9 is above the expected 3.05 to 3.45 (expected_curve)"]


def build_config(path: Path | None, strategy: str) -> Any:
    """Return what is read of a configuration."""
    return SimpleNamespace(
        pretraining=PretrainingConfig(expected_curve=None if path is None else str(path)),
        locate={"expected_curve": "mine.yaml:3"}.__getitem__,
        read={"eval_strategy": strategy}.__getitem__,
    )


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({}, DataError),
        ({"curve": {"metric": "loss"}, "num_tokens": 1e6}, DataError),
        ({"curve": CURVE | {"low": ["much", 1]}, "num_tokens": 1e6}, DataError),
        ({"curve": CURVE | {"low": [1.0]}, "num_tokens": 1e6}, DataError),
        (
            {"curve": {"metric": "loss", "shares": [], "losses": [], "low": [], "high": []}, "num_tokens": 1e6},
            DataError,
        ),
        ({"curve": CURVE | {"shares": [1.0, 0.2]}, "num_tokens": 1e6}, DataError),
        ({"curve": CURVE | {"high": [4.2, float("nan")]}, "num_tokens": 1e6}, DataError),
        ({"curve": CURVE | {"metric": "accuracy"}, "num_tokens": 1e6}, DataError),
        ({"curve": CURVE, "num_tokens": 0}, DataError),
        ({"curve": CURVE, "num_tokens": 1.1e6}, ConfigError),
        ({"curve": CURVE, "num_tokens": 1_010_000}, None),  # As other programs than ours write it.
    ],
)
def test_file_without_curve_or_of_another_length_is_refused(tmp_path, record, error) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(record))
    config = build_config(path, "steps")
    if error is None:
        verify_expected_curve(config, 1_000_000, has_eval=True)
    else:
        with pytest.raises(error, match=r"mine.yaml:3|curve.json"):
            verify_expected_curve(config, 1_000_000, has_eval=True)


@pytest.mark.parametrize(("strategy", "has_eval"), [("no", True), ("steps", False)])
def test_curve_of_held_out_losses_needs_evaluations(tmp_path, strategy, has_eval) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"curve": CURVE, "num_tokens": 1e6}))
    with pytest.raises(ConfigError, match="this run is not evaluated"):
        verify_expected_curve(build_config(path, strategy), 1_000_000, has_eval=has_eval)
    path.write_text(json.dumps({"curve": CURVE | {"metric": "loss"}, "num_tokens": 1e6}))
    verify_expected_curve(build_config(path, strategy), 1_000_000, has_eval=has_eval)


def test_last_loss_is_expected_only_of_held_out_curves(tmp_path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"curve": CURVE, "num_tokens": 1e6}))
    assert expect_loss(build_config(path, "steps")) == {"eval_loss": 2.0}
    path.write_text(json.dumps({"curve": CURVE | {"metric": "loss"}, "num_tokens": 1e6}))
    assert expect_loss(build_config(path, "steps")) == {}


def test_monitor_is_that_of_the_file(tmp_path) -> None:
    writer, progress = MetricsWriter(tmp_path / METRICS_FILE, is_main=True), Lines()
    assert list(build_expected_curve(build_config(None, "steps"), writer, progress)) == []
    assert expect_loss(build_config(None, "steps")) == {}
    (tmp_path / "curve.json").write_text(json.dumps({"curve": CURVE, "num_tokens": 1e6}))
    (monitor,) = build_expected_curve(build_config(tmp_path / "curve.json", "steps"), writer, progress)
    state = SimpleNamespace(max_steps=100, log_history=[], global_step=100)
    monitor.on_log(None, state, None, {"eval_loss": 2.3})
    assert progress.lines == ["step 100: eval_loss 2.3 is above the expected 1.8 to 2.2 (expected_curve)"]

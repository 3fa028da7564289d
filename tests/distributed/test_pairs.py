"""Preference training on two ranks, compared with one process: uneven last step, held-out pairs, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forked import run_forked
from tests.training import pairs

# Thirteen pairs are a step of eight and one of five, which two ranks with batches of one cannot divide evenly.
STORED: dict[str, Any] = {
    "name": "stored",
    "num_pairs": 13,
    "num_eval_pairs": 7,
    "max_steps": 4,
    "precompute_ref_log_probs": True,
    "per_device_eval_batch_size": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "save_strategy": "steps",
    "save_steps": 3,
}
RPO: dict[str, Any] = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "max_steps": 4}
RUNS: list[dict[str, Any]] = [
    STORED,
    RPO | {"name": "live", "num_pairs": 13, "logging_steps": 2},
    RPO | {"name": "whole steps", "num_pairs": 16, "precompute_ref_log_probs": True},
    # Resumes in the second epoch, before its smaller step.
    STORED | {"resume_from": "checkpoint-3", "save_strategy": "no"},
    STORED | {"name": "stored again", "learning_rate": 2e-3, "max_steps": 1, "save_strategy": "no"},
]
ONE: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
# ``epoch`` is counted in batches, one of which may be repeated; the others are measured.
LEFT_OUT = ("epoch", "seconds", "runtime", "per_second", "flos")


def run_on_two_processes(model_dir: Path, output_dir: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    output_dir.mkdir()
    run_forked("tests.training.pairs", model_dir, output_dir, json.dumps(runs))
    reports: list[dict[str, Any]] = json.loads((output_dir / "reports.json").read_text())
    return reports


def assert_same_logs(expected: list[dict[str, float]], got: list[dict[str, float]], what: str) -> None:
    assert len(got) == len(expected), what
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert one.keys() == other.keys()
        is_equal = abs(one.get("rewards/margins", one.get("eval_rewards/margins", 1.0))) < 1e-5
        for name in one:
            # Rounding decides which of two equal rewards is larger.
            if not any(part in name for part in LEFT_OUT) and not (is_equal and "accuracies" in name):
                assert other[name] == pytest.approx(one[name], rel=1e-5, abs=2e-6), f"{what}, log {number}: {name}"


@pytest.mark.multiprocess
def test_two_processes_train_on_pairs_as_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    two = run_on_two_processes(tiny_model_dir, tmp_path / "two", [run | TWO for run in RUNS])
    for run, report in zip(RUNS, two, strict=True):
        keys = {key: value for key, value in (run | ONE).items() if key != "name"}
        one = pairs.run_and_describe(tiny_model_dir, tmp_path / "one" / run["name"], keys)
        losses = [log["loss"] for log in one["logs"] if "loss" in log]
        assert len(set(losses)) == len(losses) > 0
        assert_same_logs(one["logs"], report["logs"], run["name"])
        # Stored reference log-probabilities are reused, which is logged once.
        for lines in (one["lines"], report["lines"]):
            assert sum("they are used" in line for line in lines) == (run["name"] == "stored again")

    numbers = [
        {path.name: np.load(path) for path in (tmp_path / name / "stored" / "reference").rglob("*.npy")}
        for name in ("one", "two")
    ]
    assert numbers[0].keys() == numbers[1].keys() == {"train.npy", "eval.npy"}
    for name, expected in numbers[0].items():
        assert expected.shape == ((13, 2) if name == "train.npy" else (7, 2))
        np.testing.assert_allclose(numbers[1][name], expected, rtol=1e-6)

"""Distillation on two ranks, replicated and with sharded teacher and student, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import sharding
from tests.distributed.cells import (
    FULL_PRECISION,
    FURTHER_CELLS,
    LAYERS,
    assert_same_run,
    build_jobs,
    read_weights,
    resume,
)
from tests.forked import run_forked
from tests.training import students
from tests.training.trajectories import make_packs

from recipes_lib.distillation.layer_features import PROJECTIONS_FILE

KEYS: dict[str, Any] = {"distillation_alpha": 0.3, "distillation_beta": 0.5, "distillation_temperature": 2.0}
KEYS |= {"lmbda": 0.5, "response_length": 6}
ONE: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
# Measured, or counted in batches.
LEFT_OUT = ("epoch", "runtime", "per_second", "flos")


@pytest.mark.multiprocess
def test_two_processes_match_one(tiny_model_dir, tiny_tokenizer_dir, tmp_path) -> None:
    """Every other step is on policy."""
    student_dir = students.save_student(tmp_path / "student", tiny_tokenizer_dir)
    trainer, recorder, _ = students.make_distiller(
        student_dir, tiny_model_dir, tmp_path / "one", make_packs(), **KEYS, **LAYERS, **ONE
    )
    trainer.train()
    two = tmp_path / "two"
    two.mkdir()
    keys = json.dumps(KEYS | LAYERS | TWO)
    run_forked("tests.training.students", student_dir, tiny_model_dir, two, keys)
    logs = json.loads((two / "logs.json").read_text())
    assert len(logs) == len(recorder.train_logs) == 4
    assert [("on_policy/nll" in got) for got in logs].count(True) == 2
    for expected, got in zip(recorder.train_logs, logs, strict=True):
        assert got.keys() == expected.keys()
        prefix = "on_policy" if "on_policy/nll" in got else "distillation"
        assert {f"{prefix}/{key.removesuffix('_weight')}" for key in LAYERS if "weight" in key} <= got.keys()
        for name in expected:
            if not any(part in name for part in LEFT_OUT):
                assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layer_losses_under_fsdp2_match_one_process(inputs: Path, tmp_path: Path, is_slow: bool) -> None:
    """Metrics and trained projections, also after an exact resume; in the slow form, resumed in the other layout."""
    name = "distill layers"
    one, two = (build_jobs(inputs, {name: FURTHER_CELLS[name]}, size)[name] for size in (1, 2))
    sharding.run_jobs({"run": one}, tmp_path / "one")
    jobs = {"run": two, "resumed": resume(two, tmp_path / "two" / "run")}
    sharding.run_jobs(jobs, tmp_path / "two", "fsdp2", *FULL_PRECISION)
    kinds = ("feature", "attention", "similarity", "distance", "angle")
    compared = assert_same_run(tmp_path / "one" / "run", tmp_path / "two" / "run")
    assert {f"distillation/{kind}" for kind in kinds} <= compared
    alone, straight, resumed = (_read_end(tmp_path / run) for run in ("one/run", "two/run", "two/resumed"))
    assert all(torch.equal(resumed[key], tensor) for key, tensor in straight.items())
    for key, tensor in alone.items():
        torch.testing.assert_close(straight[key], tensor, rtol=0, atol=1e-5, msg=key)
    if is_slow:
        from_one = {"from one": resume(two, tmp_path / "one" / "run")}
        sharding.run_jobs(from_one, tmp_path / "two", "fsdp2", *FULL_PRECISION)
        sharding.run_jobs({"from two": resume(one, tmp_path / "two" / "run")}, tmp_path / "one")
        for run in ("one/from two", "two/from one"):
            for key, tensor in _read_end(tmp_path / run).items():
                torch.testing.assert_close(tensor, straight[key], rtol=0, atol=1e-5, msg=f"{run}: {key}")


def _read_end(run: Path) -> dict[str, torch.Tensor]:
    """Return the final weights and the projections of the last checkpoint, which differ from the previous ones."""
    first, last = (torch.load(run / f"checkpoint-{step}" / PROJECTIONS_FILE, weights_only=True) for step in (2, 3))
    assert not any(torch.equal(first[key], tensor) for key, tensor in last.items())
    return read_weights(run) | last

"""Distillation on two ranks, with sharded teacher and student and with layer losses, compared with one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distillation.test_distillation import load, make_batch
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
from torch import distributed
from torch.distributed.fsdp import fully_shard

from recipes_lib.distillation.layer_features import PROJECTIONS_FILE
from recipes_lib.losses.distillation import Objective
from recipes_lib.models.heads.loss_head import score_beside_teacher

KEYS: dict[str, Any] = {"distillation_alpha": 0.3, "distillation_beta": 0.5, "distillation_temperature": 2.0}
ONE: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
# Measured, or counted in batches.
LEFT_OUT = ("epoch", "runtime", "per_second", "flos")


@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [{}, {"lmbda": 0.5, "response_length": 6}], ids=["off_policy", "on_policy"])
def test_two_processes_match_one(tiny_model_dir, tiny_tokenizer_dir, tmp_path, more) -> None:
    student_dir = students.save_student(tmp_path / "student", tiny_tokenizer_dir)
    trainer, recorder, _ = students.make_distiller(
        student_dir, tiny_model_dir, tmp_path / "one", make_packs(), **KEYS, **LAYERS, **ONE, **more
    )
    trainer.train()
    two = tmp_path / "two"
    two.mkdir()
    keys = json.dumps(KEYS | LAYERS | TWO | more)
    run_forked("tests.training.students", student_dir, tiny_model_dir, two, keys)
    logs = json.loads((two / "logs.json").read_text())
    assert len(logs) == len(recorder.train_logs) == 4
    for expected, got in zip(recorder.train_logs, logs, strict=True):
        assert got.keys() == expected.keys()
        prefix = "on_policy" if "on_policy/nll" in got else "distillation"
        assert {f"{prefix}/{key.removesuffix('_weight')}" for key in LAYERS if "weight" in key} <= got.keys()
        for name in expected:
            if not any(part in name for part in LEFT_OUT):
                assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


@pytest.mark.multiprocess
def test_sharded_models_have_loss_and_gradients_of_whole_ones(tiny_model_dir, tiny_tokenizer_dir, tmp_path) -> None:
    student_dir = students.save_student(tmp_path / "student", tiny_tokenizer_dir)
    run_forked("tests.distributed.test_distill", student_dir, tiny_model_dir, tmp_path / "sharded.pt")
    loss, gradients = _score(student_dir, tiny_model_dir, is_sharded=False)
    sharded_loss, sharded_gradients = torch.load(tmp_path / "sharded.pt", weights_only=True)
    torch.testing.assert_close(sharded_loss, loss)
    assert sharded_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(sharded_gradients[name], expected, msg=name)


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


def _score(student_dir: Path, teacher_dir: Path, *, is_sharded: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    student, teacher = load(student_dir, is_teacher=False), load(teacher_dir, is_teacher=True)
    if is_sharded:
        for model in (student, teacher):
            for layer in model.model.layers:
                fully_shard(layer, reshard_after_forward=True)
            fully_shard(model, reshard_after_forward=True)  # As accelerate: layers first, then the model.
    inputs, labels = make_batch()
    loss = score_beside_teacher(student, teacher, inputs, labels, Objective(0.3, 0.5, 2.0)).result.loss_sum
    loss.backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in student.named_parameters()}
    if is_sharded:
        assert all(parameter.to_local().numel() < parameter.numel() for parameter in teacher.parameters())
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    return loss.detach(), gradients


def main() -> None:
    """Compute loss and gradients on one of two ranks, with both models sharded: ``STUDENT TEACHER OUTPUT``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    result = _score(Path(sys.argv[1]), Path(sys.argv[2]), is_sharded=True)
    if distributed.get_rank() == 0:
        torch.save(result, sys.argv[3])
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

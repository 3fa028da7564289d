"""Training trajectories are independent of gradient accumulation and world size."""

import json

import pytest
from tests.forked import run_forked
from tests.training import trajectories

EIGHT_BY_ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO_BY_FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ONE_BY_FOUR = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


def run_here(model_dir, output_dir, **training):
    trainer, recorder = trajectories.make_trainer(model_dir, output_dir, trajectories.make_packs(), **training)
    trainer.train()
    return recorder.steps


def run_on_two_processes(model_dir, output_dir, **training):
    output_dir.mkdir()
    run_forked("tests.training.trajectories", model_dir, output_dir, json.dumps(training))
    return json.loads((output_dir / "trajectory.json").read_text())


@pytest.mark.multiprocess
def test_trajectory_is_independent_of_accumulation_and_world_size(tiny_model_dir, tmp_path):
    reference = run_here(tiny_model_dir, tmp_path / "8x1", **EIGHT_BY_ONE)
    others = {
        "2x4": run_here(tiny_model_dir, tmp_path / "2x4", **TWO_BY_FOUR),
        "1x4 on two processes": run_on_two_processes(tiny_model_dir, tmp_path / "two", **ONE_BY_FOUR),
    }
    assert len(reference) == 4
    assert len({step["loss"] for step in reference}) == 4
    for name, trajectory in others.items():
        for step, (expected, got) in enumerate(zip(reference, trajectory, strict=True)):
            assert got == pytest.approx(expected, rel=1e-5), f"{name}, step {step + 1}"

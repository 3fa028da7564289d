"""Killed at whatever moment of a save, a run goes on from a checkpoint that is whole, to the very same end."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of

from recipes_lib.training.checkpoints import checkpointing
from recipes_lib.training.checkpoints import manifest as checkpoints
from recipes_lib.training.checkpoints.manifest import clear_leftovers, find_damage, list_checkpoints

KEYS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
# What changes the disk: each is done, or killed before it.
OPERATIONS = [
    (os, "fsync"),
    (os, "mkdir"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "write_text"),
    (shutil, "rmtree"),
    (checkpointing.torch, "save"),
    (checkpoints, "hash_file"),
]


def kill_before(number, patch):
    """Let this process die before its n-th operation; return the count of those so far."""
    count = [0]

    def wrap(operation):
        def counted(*args, **kwargs):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return counted

    for owner, name in OPERATIONS:
        patch.setattr(owner, name, wrap(getattr(owner, name)))
    return count


def train_in_child(model_dir, output_dir, number):
    """Train in a process of its own until the n-th operation; return whether it lived to the end."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with pytest.MonkeyPatch.context() as patch:
                kill_before(number, patch)
                make_trainer(model_dir, output_dir, make_packs(), **KEYS)[0].train()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), os.waitstatus_to_exitcode(status)
    return status == 0


def go_on(model_dir, output_dir):
    """Do as the next start does, and train to the end."""
    clear_leftovers(output_dir)
    checkpoints = [path for _, path in list_checkpoints(output_dir)]
    assert not any(map(find_damage, checkpoints))
    resume_from = next(iter(checkpoints), None)
    trainer, recorder = make_trainer(model_dir, output_dir, make_packs(), **KEYS)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer, recorder, resume_from


@pytest.fixture(scope="module")
def straight(tiny_model_dir, tmp_path_factory):
    """A run that nothing happens to: its trainer, its losses, and how many operations it takes."""
    output_dir = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        count = kill_before(None, patch)
        trainer, recorder = make_trainer(tiny_model_dir, output_dir, make_packs(), **KEYS)
        trainer.train()
    return trainer, recorder, count[0]


def assert_survives(tiny_model_dir, output_dir, straight, number):
    trainer, recorder, _ = straight
    if train_in_child(tiny_model_dir, output_dir, number):
        return None
    resumed, later, resume_from = go_on(tiny_model_dir, output_dir)
    assert_equal_weights(weights_of(resumed), weights_of(trainer))
    step = 0 if resume_from is None else int(resume_from.name.rpartition("-")[2])
    assert later.steps == recorder.steps[step:]
    left = sorted(path.name for path in output_dir.iterdir())
    # Killed after the last save and before the older one was deleted, there is no other save that would delete it.
    assert left == ["checkpoint-3"] or (step == 3 and left == ["checkpoint-2", "checkpoint-3"])
    assert find_damage(output_dir / "checkpoint-3") is None
    return step


def test_killed_at_moments_of_every_kind_a_run_ends_as_if_it_had_not_been(tiny_model_dir, tmp_path, straight):
    total = straight[2]
    assert total > 60
    survived = [
        assert_survives(tiny_model_dir, tmp_path / str(number), straight, number) for number in range(7, total, 19)
    ]
    # In the dry run, in the first save, and in later ones, where an older one must not be gone too early.
    assert {0, 1, 2} <= set(survived)


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(tiny_model_dir, tmp_path, straight):
    survived = [
        assert_survives(tiny_model_dir, tmp_path / str(number), straight, number)
        for number in range(1, straight[2] + 1)
    ]
    assert None not in survived
    # A checkpoint that was once whole is never lost.
    assert survived == sorted(survived)

"""SIGKILL before any disk operation of a save: the run resumes from a complete checkpoint, bit-identically."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.forked import limit_forked
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of

from recipes_lib.training.checkpoints import checkpointing
from recipes_lib.training.checkpoints import manifest as checkpoints
from recipes_lib.training.checkpoints.manifest import clear_leftovers, find_damage, list_checkpoints

KEYS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
# Functions that change the disk, and the hashing of files: the process is killed before one of their calls.
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
    """Kill this process before its n-th operation; return a list with the number of operations so far."""
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


def train_in_forked_process(model_dir, output_dir, number):
    """Train in a forked process, killed before its n-th operation; return whether it finished."""
    pid = os.fork()
    if not pid:
        limit_forked()
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


def resume(model_dir, output_dir):
    """Clean up, resume from the newest checkpoint and train to the end, as the next start does."""
    clear_leftovers(output_dir)
    checkpoints = [path for _, path in list_checkpoints(output_dir)]
    assert not any(map(find_damage, checkpoints))
    resume_from = next(iter(checkpoints), None)
    trainer, recorder = make_trainer(model_dir, output_dir, make_packs(), **KEYS)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer, recorder, resume_from


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir, tmp_path_factory):
    """Trainer, recorder and number of disk operations of a run without a kill."""
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        count = kill_before(None, patch)
        trainer, recorder = make_trainer(tiny_model_dir, output_dir, make_packs(), **KEYS)
        trainer.train()
    return trainer, recorder, count[0]


def assert_resumes_bit_identically(tiny_model_dir, output_dir, uninterrupted, number):
    trainer, recorder, _ = uninterrupted
    if train_in_forked_process(tiny_model_dir, output_dir, number):
        return None
    resumed, later, resume_from = resume(tiny_model_dir, output_dir)
    assert_equal_weights(weights_of(resumed), weights_of(trainer))
    step = 0 if resume_from is None else int(resume_from.name.rpartition("-")[2])
    assert later.steps == recorder.steps[step:]
    names = sorted(path.name for path in output_dir.iterdir())
    # Killed between the last save and the deletion of the older one: no later save deletes it.
    assert names == ["checkpoint-3"] or (step == 3 and names == ["checkpoint-2", "checkpoint-3"])
    assert find_damage(output_dir / "checkpoint-3") is None
    return step


def test_kill_at_sampled_operations_resumes_bit_identically(tiny_model_dir, tmp_path, uninterrupted):
    total = uninterrupted[2]
    assert total > 60
    # In the dry run, the first save, and later ones, which delete an older checkpoint.
    steps = [
        assert_resumes_bit_identically(tiny_model_dir, tmp_path / str(number), uninterrupted, number)
        for number in (total // 8, total // 2, total * 7 // 8)
    ]
    assert {0, 1, 2} <= set(steps)


@pytest.mark.slow
def test_kill_at_any_operation_resumes_bit_identically(tiny_model_dir, tmp_path, uninterrupted):
    steps = [
        assert_resumes_bit_identically(tiny_model_dir, tmp_path / str(number), uninterrupted, number)
        for number in range(1, uninterrupted[2] + 1)
    ]
    assert None not in steps
    # A later kill never resumes from an earlier checkpoint.
    assert steps == sorted(steps)

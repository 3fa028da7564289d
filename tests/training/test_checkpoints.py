"""Only a checkpoint that is whole may be resumed."""

import json

import pytest

from recipes_lib.training.checkpoints import (
    COMPLETE,
    find_last_complete,
    is_complete,
    rotate,
    supersede,
    write_complete,
)


def make_checkpoint(output_dir, step, *, sealed=True):
    checkpoint = output_dir / f"checkpoint-{step}"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights" * step)
    (checkpoint / "nested" / "state.json").write_text("{}")
    if sealed:
        write_complete(checkpoint, step=step, world_size=2)
    return checkpoint


def test_a_sealed_checkpoint_is_complete_and_says_what_it_holds(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 3)
    assert is_complete(checkpoint)
    record = json.loads((checkpoint / COMPLETE).read_text())
    assert record == {"step": 3, "world_size": 2, "files": {"model.safetensors": 21, "nested/state.json": 2}}


@pytest.mark.parametrize("damage", ["truncate", "remove", "unsealed", "empty seal", "torn seal", "foreign seal"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    good = make_checkpoint(tmp_path, 9)
    bad = make_checkpoint(tmp_path, 10, sealed=damage != "unsealed")
    if damage == "truncate":
        (bad / "model.safetensors").write_bytes(b"w")
    if damage == "remove":
        (bad / "nested" / "state.json").unlink()
    if damage.endswith("seal"):
        (bad / COMPLETE).write_text({"empty seal": "", "torn seal": '{"files": {', "foreign seal": "[]"}[damage])
    assert find_last_complete(tmp_path) == (good, [bad])


def test_steps_are_compared_as_numbers_and_other_folders_are_not_checkpoints(tmp_path):
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 100)
    make_checkpoint(tmp_path, 20)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-300.partial").mkdir()
    assert find_last_complete(tmp_path) == (newest, [])


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert find_last_complete(tmp_path) == (None, [])
    assert find_last_complete(tmp_path / "absent") == (None, [])


def steps_in(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_steps", "kept"),
    [(None, (), (1, 2, 3, 10)), (2, (), (3, 10)), (1, (2,), (2, 10)), (9, (), (1, 2, 3, 10))],
)
def test_the_newest_and_the_chosen_stay(tmp_path, keep_last, keep_steps, kept):
    for step in (1, 2, 3, 10):
        make_checkpoint(tmp_path, step)
    rotate(tmp_path, keep_last, keep_steps)
    assert steps_in(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


def test_what_is_not_whole_takes_no_place_and_goes_when_it_is_old(tmp_path):
    for step, sealed in ((1, True), (2, False), (3, True), (4, False)):
        make_checkpoint(tmp_path, step, sealed=sealed)
    rotate(tmp_path, 2, ())
    assert steps_in(tmp_path) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


def test_superseded_checkpoints_are_kept_and_never_resumed(tmp_path):
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)
    supersede(tmp_path, after_step=5)
    assert steps_in(tmp_path) == ["checkpoint-5", "superseded-checkpoint-10", "superseded-checkpoint-15"]
    make_checkpoint(tmp_path, 10)
    supersede(tmp_path, after_step=5)
    assert find_last_complete(tmp_path) == (tmp_path / "checkpoint-5", [])

"""Only a checkpoint that is whole may be resumed."""

import hashlib
import json

import pytest

from recipes_lib.training.checkpoints import (
    COMPLETE,
    REHEARSAL,
    STAGING,
    clear_leftovers,
    find_damage,
    find_last_complete,
    find_last_whole,
    is_complete,
    publish,
    read_complete,
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
    contents = {"model.safetensors": b"weights" * 3, "nested/state.json": b"{}"}
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    assert record == {"step": 3, "world_size": 2, "files": files}
    assert read_complete(checkpoint) == record
    assert find_damage(checkpoint) is None


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


def test_what_is_to_stay_for_ever_stays(tmp_path):
    for step in (2, 4, 6, 8, 10, 12):
        make_checkpoint(tmp_path, step)
    rotate(tmp_path, 1, (2,), keep_every=4)
    assert steps_in(tmp_path) == sorted(f"checkpoint-{step}" for step in (2, 4, 8, 12))


def test_what_is_not_whole_takes_no_place_and_is_never_deleted(tmp_path):
    for step, sealed in ((1, True), (2, False), (3, True), (4, False), (5, True)):
        make_checkpoint(tmp_path, step, sealed=sealed)
    rotate(tmp_path, 2, ())
    assert steps_in(tmp_path) == [f"checkpoint-{step}" for step in (2, 3, 4, 5)]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip_a_bit(path / "model.safetensors"), "model.safetensors holds other bytes"),
        (lambda path: (path / "model.safetensors").write_bytes(b"w"), "model.safetensors has 1 bytes and not 70"),
        (lambda path: (path / "nested" / "state.json").unlink(), "nested/state.json cannot be read (No such file"),
        (lambda path: (path / COMPLETE).unlink(), "it has no readable COMPLETE.json"),
        (lambda path: (path / COMPLETE).write_text('{"files": {"a": 3}}'), "it has no readable COMPLETE.json"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path, damage, words):
    make_checkpoint(tmp_path, 8)
    good, bad = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    damage(bad)
    lines = []
    assert find_last_whole(tmp_path, lines.append) == good
    assert len(lines) == 1
    assert words in lines[0]
    # It neither counts any more nor is it gone.
    assert steps_in(tmp_path) == ["checkpoint-8", "checkpoint-9", "damaged-checkpoint-10"]
    rotate(tmp_path, 2, ())
    assert find_last_whole(tmp_path, lines.append) == good
    assert steps_in(tmp_path) == ["checkpoint-8", "checkpoint-9", "damaged-checkpoint-10"]


def test_where_nothing_is_whole_there_is_nothing_to_go_on_from(tmp_path):
    flip_a_bit(make_checkpoint(tmp_path, 3) / "model.safetensors")
    assert find_last_whole(tmp_path, lambda _: None) is None


def test_a_checkpoint_takes_the_place_of_one_of_the_same_step(tmp_path):
    make_checkpoint(tmp_path, 5)
    staged = make_checkpoint(tmp_path / STAGING, 5, sealed=False)
    (staged / "newer").write_text("")
    write_complete(staged, step=5)
    assert publish(staged) == tmp_path / "checkpoint-5"
    assert (tmp_path / "checkpoint-5" / "newer").exists()
    assert is_complete(tmp_path / "checkpoint-5")


def test_what_a_dead_process_left_is_removed_and_what_it_had_sealed_is_kept(tmp_path):
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path / STAGING, 2)
    make_checkpoint(tmp_path / STAGING, 3, sealed=False)
    make_checkpoint(tmp_path / REHEARSAL, 1)
    (tmp_path / "_deleted" / "checkpoint-0").mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    clear_leftovers(tmp_path)
    assert steps_in(tmp_path) == ["checkpoint-1", "checkpoint-2", "run.json"]
    clear_leftovers(tmp_path / "absent")


def test_superseded_checkpoints_are_kept_and_never_resumed(tmp_path):
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)
    supersede(tmp_path, after_step=5)
    assert steps_in(tmp_path) == ["checkpoint-5", "superseded-checkpoint-10", "superseded-checkpoint-15"]
    make_checkpoint(tmp_path, 10)
    supersede(tmp_path, after_step=5)
    assert find_last_complete(tmp_path) == (tmp_path / "checkpoint-5", [])

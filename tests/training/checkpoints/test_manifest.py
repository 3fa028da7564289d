"""Only a checkpoint that is whole may be resumed."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from recipes_lib.training.checkpoints import manifest as checkpoints
from recipes_lib.training.checkpoints.manifest import (
    COMPLETE,
    DRY_RUN,
    STAGING,
    clear_leftovers,
    find_damage,
    find_last_complete,
    flush_files,
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
    assert find_last_complete(tmp_path) == good


def test_steps_are_compared_as_numbers_and_other_folders_are_not_checkpoints(tmp_path):
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 100)
    make_checkpoint(tmp_path, 20)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-300.partial").mkdir()
    assert find_last_complete(tmp_path) == newest


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert find_last_complete(tmp_path) is None
    assert find_last_complete(tmp_path / "absent") is None


def steps_in(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_steps", "keep_every", "kept"),
    [
        (None, (), None, (1, 2, 3, 10)),
        (2, (), None, (3, 10)),
        (1, (2,), None, (2, 10)),
        (9, (), None, (1, 2, 3, 10)),
        (1, (1,), 2, (1, 2, 10)),
    ],
)
def test_the_newest_and_the_chosen_stay(tmp_path, keep_last, keep_steps, keep_every, kept):
    for step in (1, 2, 3, 10):
        make_checkpoint(tmp_path, step)
    rotate(tmp_path, keep_last, keep_steps, keep_every)
    assert steps_in(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


def test_what_cannot_be_deleted_is_told_and_the_others_go(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "checkpoint-2":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert rotate(tmp_path, 1, ()) == ["checkpoint-2 (Device or resource busy)"]
    assert steps_in(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_what_is_not_whole_takes_no_place_and_is_never_deleted(tmp_path):
    for step, sealed in ((1, True), (2, False), (3, True), (4, False), (5, True)):
        make_checkpoint(tmp_path, step, sealed=sealed)
    rotate(tmp_path, 2, ())
    assert steps_in(tmp_path) == [f"checkpoint-{step}" for step in (2, 3, 4, 5)]


def test_a_checkpoint_takes_the_place_of_a_broken_link(tmp_path):
    """The older one was moved to another disk, linked, and deleted there."""
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "gone")
    staged = make_checkpoint(tmp_path / STAGING, 3)
    assert is_complete(publish(staged))
    assert steps_in(tmp_path) == ["checkpoint-3"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip_a_bit(path / "model.safetensors"), "model.safetensors does not match its SHA-256"),
        (lambda path: (path / "model.safetensors").write_bytes(b"w"), "model.safetensors has 1 bytes instead of 70"),
        (lambda path: (path / "nested" / "state.json").unlink(), "nested/state.json cannot be read (No such file"),
        (lambda path: (path / COMPLETE).unlink(), "it has no readable COMPLETE.json"),
        (lambda path: (path / COMPLETE).write_text('{"files": {"a": 3}}'), "it has no readable COMPLETE.json"),
        (
            lambda path: (path / COMPLETE).write_text(r'{"files": {"\ud800": {"size": 1, "sha256": ""}}}'),
            "cannot be read ('utf-8' codec can't encode",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, words):
    checkpoint = make_checkpoint(tmp_path, 10)
    damage(checkpoint)
    assert words in find_damage(checkpoint)


NAMES = [
    "config.json",
    "model.safetensors",
    "model_shards/shard-00001-model-00001-of-00001.safetensors",
    "model_shards/shard-00003-model-00001-of-00001.safetensors",
    "policy/optimizer_shards/shard-00002-model-00001-of-00001.safetensors",
    "rng_state.pth",
    "rng_state_0.pth",
    "rng_state_2.pth",
    "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "global_step4/zero_pp_rank_2_mp_rank_00_model_states.pt",
    "global_step4/mp_rank_00_model_states.pt",
]
WRITERS = [0, 0, 0, 2, 1, 0, 0, 2, 1, 2, 0]
"""Of ``NAMES``, in a launch of three processes."""


def write_files(checkpoint):
    for size, name in enumerate(NAMES):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(name.encode() * (size + 1))


def test_each_process_flushes_what_it_wrote_and_together_they_seal_as_one_would(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "three"):
        write_files(folder)
    shares = [flush_files(tmp_path / "three", rank, 3) for rank in range(3)]
    assert [sorted(share) for share in shares] == [
        sorted(name for name, writer in zip(NAMES, WRITERS, strict=True) if writer == rank) for rank in range(3)
    ]
    write_complete(
        tmp_path / "three", {name: file for share in reversed(shares) for name, file in share.items()}, step=3
    )
    write_complete(tmp_path / "one", step=3)
    assert (tmp_path / "three" / COMPLETE).read_bytes() == (tmp_path / "one" / COMPLETE).read_bytes()
    # Two that go on from three, or whatever names may be in it, leave out no file and read none twice.
    assert sorted(name for rank in range(2) for name in flush_files(tmp_path / "three", rank, 2)) == sorted(NAMES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_of_all_that_share_a_reading_one_sees_the_damage(tmp_path, world_size, monkeypatch):
    write_files(tmp_path)
    write_complete(tmp_path, step=3)
    read = []
    monkeypatch.setattr(
        checkpoints, "hash_file", lambda path, hash_=checkpoints.hash_file: (read.append(path), hash_(path))[1]
    )
    sizes = []
    for rank in range(world_size):
        before = len(read)
        assert find_damage(tmp_path, rank, world_size) is None
        sizes.append(sum(path.stat().st_size for path in read[before:]))
    assert sorted(read) == sorted(tmp_path / name for name in NAMES)
    # None has more than its part and one file.
    assert max(sizes) <= sum(sizes) / world_size + max((tmp_path / name).stat().st_size for name in NAMES)
    flip_a_bit(tmp_path / NAMES[3])
    found = [find_damage(tmp_path, rank, world_size) for rank in range(world_size)]
    assert [damage for damage in found if damage] == [f"{NAMES[3]} does not match its SHA-256"]


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
    make_checkpoint(tmp_path / DRY_RUN, 1)
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
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-5"


@pytest.mark.parametrize(
    "forge",
    [
        lambda record: record["files"].update({"/dev/zero": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"../other": {"size": 1, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"pipe": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"link": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"model.safetensors": [7]}),
        lambda record: record.update(files=["model.safetensors"]),
        lambda record: record.update(world_size=0),
        lambda record: record.update(step="5"),
        lambda record: record.update(gradient_accumulation_steps=True),
        lambda record: record.update(run=5),
    ],
)
def test_a_forged_seal_is_none(tmp_path, forge):
    """Nothing outside the folder is read, and nothing without an end."""
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_complete(checkpoint, step=5, world_size=1)
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "link").symlink_to("/dev/zero")
    (tmp_path / "other").write_bytes(b"x")
    assert is_complete(checkpoint)
    record = json.loads((checkpoint / COMPLETE).read_text())
    forge(record)
    (checkpoint / COMPLETE).write_text(json.dumps(record))
    assert not is_complete(checkpoint)
    assert find_damage(checkpoint) is not None
    assert find_last_complete(tmp_path) is None

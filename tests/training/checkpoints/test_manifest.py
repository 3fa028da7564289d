"""``COMPLETE.json``: completeness, integrity, publishing and retention of checkpoints."""

import errno
import hashlib
import json
import os
import stat
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


def make_checkpoint(output_dir, step, *, complete=True):
    checkpoint = output_dir / f"checkpoint-{step}"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights" * step)
    (checkpoint / "nested" / "state.json").write_text("{}")
    if complete:
        write_complete(checkpoint, step=step, world_size=2)
    return checkpoint


def test_manifest_lists_size_and_hash_of_every_file(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 3, complete=False)
    (checkpoint / "model.safetensors").chmod(0o600)  # As safetensors writes it.
    checkpoint.chmod(0o755)
    write_complete(checkpoint, step=3, world_size=2)
    assert stat.S_IMODE((checkpoint / "model.safetensors").stat().st_mode) == 0o644
    assert is_complete(checkpoint)
    record = json.loads((checkpoint / COMPLETE).read_text())
    contents = {"model.safetensors": b"weights" * 3, "nested/state.json": b"{}"}
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    assert record == {"step": 3, "world_size": 2, "files": files}
    assert read_complete(checkpoint) == record
    assert find_damage(checkpoint) is None


def test_each_name_follows_what_it_names_to_the_disk(tmp_path, monkeypatch):
    """A power cut must not leave a manifest without its files, nor a name without its folder."""
    make_checkpoint(tmp_path, 5)
    staged, events = make_checkpoint(tmp_path / STAGING, 5, complete=False), []

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda path, *rest: (events.append((name, path)), function(path, *rest))[1])

    for name in ("fsync", "replace_record", "clear_trash"):
        record(checkpoints, name)
    record(Path, "rename")
    write_complete(staged)
    publish(staged)
    files = [("fsync", staged / name) for name in ("model.safetensors", "nested/state.json", "nested")]
    manifest = [("replace_record", staged / COMPLETE), ("fsync", staged)]
    renamed = [("rename", tmp_path / "checkpoint-5"), ("rename", staged), ("fsync", tmp_path)]
    assert events == [*files, *manifest, *renamed, ("clear_trash", tmp_path)]


@pytest.mark.parametrize(
    "damage", ["truncate", "remove", "renamed", "no manifest", "empty manifest", "truncated manifest", "other manifest"]
)
def test_find_last_complete_skips_damaged_checkpoint(tmp_path, damage):
    good = make_checkpoint(tmp_path, 9)
    bad = make_checkpoint(tmp_path, 10, complete=damage != "no manifest")
    if damage == "truncate":
        (bad / "model.safetensors").write_bytes(b"w")
    if damage == "remove":
        (bad / "nested" / "state.json").unlink()
    if damage == "renamed":
        write_complete(bad, step=7)
    contents = {"empty manifest": "", "truncated manifest": '{"files": {', "other manifest": "[]"}
    if damage in contents:
        (bad / COMPLETE).write_text(contents[damage])
    assert find_last_complete(tmp_path) == good


def test_checkpoints_are_sorted_by_number(tmp_path):
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 100)
    make_checkpoint(tmp_path, 20)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-300.partial").mkdir()
    assert find_last_complete(tmp_path) == newest


def test_folder_that_cannot_be_listed_is_not_one_without_checkpoints(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    make_checkpoint(tmp_path, 3)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError):
        find_last_complete(tmp_path)


def test_find_last_complete_without_checkpoint(tmp_path):
    assert find_last_complete(tmp_path) is None
    assert find_last_complete(tmp_path / "absent") is None


def list_names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_steps", "keep_every", "kept"),
    [
        (None, (), None, (0, 1, 2, 3, 10)),
        (2, (), None, (3, 10)),
        (1, (2,), None, (2, 10)),
        (9, (), None, (0, 1, 2, 3, 10)),
        (1, (1,), 2, (1, 2, 10)),  # Without checkpoint-0, which is the first target of rollbacks.
    ],
)
def test_rotate_keeps_newest_and_protected(tmp_path, keep_last, keep_steps, keep_every, kept):
    for step in (0, 1, 2, 3, 10):
        make_checkpoint(tmp_path, step)
    rotate(tmp_path, keep_last, keep_steps, keep_every)
    assert list_names(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


def test_rotate_reads_no_permanent_checkpoint(tmp_path, monkeypatch):
    for step in range(1, 7):
        make_checkpoint(tmp_path, step)
    read = []
    monkeypatch.setattr(
        checkpoints,
        "is_complete",
        lambda path, is_complete_=is_complete: (read.append(path.name), is_complete_(path))[1],
    )
    rotate(tmp_path, 2, (1,), keep_every=2)
    assert read == ["checkpoint-6", "checkpoint-5", "checkpoint-3"]
    assert list_names(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 4, 5, 6)]


def test_rotate_reports_checkpoint_that_cannot_be_deleted(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "checkpoint-2":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert rotate(tmp_path, 1, ()) == ["checkpoint-2 (Device or resource busy)"]
    assert list_names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_rotate_neither_counts_nor_deletes_incomplete_checkpoints(tmp_path):
    for step, complete in ((1, True), (2, False), (3, True), (4, False), (5, True)):
        make_checkpoint(tmp_path, step, complete=complete)
    rotate(tmp_path, 2, ())
    assert list_names(tmp_path) == [f"checkpoint-{step}" for step in (2, 3, 4, 5)]


def test_publish_replaces_broken_symlink(tmp_path):
    """As of a checkpoint that was moved to another disk, linked, and deleted there."""
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "gone")
    staged = make_checkpoint(tmp_path / STAGING, 3)
    assert is_complete(publish(staged))
    assert list_names(tmp_path) == ["checkpoint-3"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
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
def test_find_damage_names_file(tmp_path, damage, message):
    checkpoint = make_checkpoint(tmp_path, 10)
    damage(checkpoint)
    assert message in find_damage(checkpoint)


def test_file_that_fails_to_be_read_is_damaged(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoint = make_checkpoint(tmp_path, 10)
    monkeypatch.setattr(checkpoints, "hash_file", fail)
    assert find_damage(checkpoint) == "model.safetensors cannot be read (Input/output error)"


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
"""Rank that writes each of ``NAMES``, with a world size of three."""


def write_files(checkpoint):
    for size, name in enumerate(NAMES):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(name.encode() * (size + 1))


def test_manifest_of_several_ranks_equals_manifest_of_one(tmp_path):
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
    # At any other world size, and for any names, every file is flushed exactly once.
    assert sorted(name for rank in range(2) for name in flush_files(tmp_path / "three", rank, 2)) == sorted(NAMES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_ranks_share_verification_evenly(tmp_path, world_size, monkeypatch):
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
    # No rank reads more than its share plus one file.
    assert max(sizes) <= sum(sizes) / world_size + max((tmp_path / name).stat().st_size for name in NAMES)
    flip_a_bit(tmp_path / NAMES[3])
    damages = [find_damage(tmp_path, rank, world_size) for rank in range(world_size)]
    assert [damage for damage in damages if damage] == [f"{NAMES[3]} does not match its SHA-256"]


def test_publish_replaces_checkpoint_of_same_step(tmp_path):
    make_checkpoint(tmp_path, 5)
    staged = make_checkpoint(tmp_path / STAGING, 5, complete=False)
    (staged / "newer").write_text("")
    write_complete(staged, step=5)
    assert publish(staged) == tmp_path / "checkpoint-5"
    assert (tmp_path / "checkpoint-5" / "newer").exists()
    assert is_complete(tmp_path / "checkpoint-5")
    assert list_names(tmp_path) == ["checkpoint-5"]


def test_publish_keeps_incomplete_checkpoint_of_same_step(tmp_path):
    """As of another program, which writes no manifest."""
    for number in ("", "-2"):
        make_checkpoint(tmp_path, 5, complete=False)
        publish(make_checkpoint(tmp_path / STAGING, 5))
        assert is_complete(tmp_path / "checkpoint-5")
        assert (tmp_path / f"replaced-checkpoint-5{number}" / "model.safetensors").exists()
        (tmp_path / "checkpoint-5" / COMPLETE).unlink()
        (tmp_path / "checkpoint-5").rename(tmp_path / f"moved{number}")


def test_clear_leftovers_publishes_complete_and_deletes_rest(tmp_path):
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path / STAGING, 2)
    make_checkpoint(tmp_path / STAGING, 3, complete=False)
    make_checkpoint(tmp_path / DRY_RUN, 1)
    (tmp_path / "_deleted" / "checkpoint-0").mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    clear_leftovers(tmp_path)
    assert list_names(tmp_path) == ["checkpoint-1", "checkpoint-2", "run.json"]
    clear_leftovers(tmp_path / "absent")


def test_superseded_checkpoint_is_kept_but_not_resumed(tmp_path):
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)
    supersede(tmp_path, after_step=5)
    assert list_names(tmp_path) == ["checkpoint-5", "superseded-checkpoint-10", "superseded-checkpoint-15"]
    make_checkpoint(tmp_path, 10)
    supersede(tmp_path, after_step=5)
    # One of each step: repeated rollbacks do not fill the disk.
    assert list_names(tmp_path) == ["checkpoint-5", "superseded-checkpoint-10", "superseded-checkpoint-15"]
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-5"


@pytest.mark.parametrize(
    "forge",
    [
        lambda record: record["files"].update({"/dev/zero": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"../other": {"size": 1, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"pipe": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"link": {"size": 0, "sha256": "0" * 64}}),
        lambda record: record["files"].update({"model.safetensors": [7]}),
        lambda record: record["files"]["model.safetensors"].pop("sha256"),
        lambda record: record.update(files=["model.safetensors"]),
        lambda record: record.update(world_size=0),
        lambda record: record.update(step="5"),
        lambda record: record.update(gradient_accumulation_steps=True),
        lambda record: record.update(run=5),
    ],
)
def test_untrusted_manifest_is_rejected(tmp_path, forge):
    """Neither files outside the folder nor devices and pipes are read."""
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

"""The store of prepared sets: round trip, locks, atomic publication, damage, kills and disk errors."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.faults.moments import kill_at_call
from tests.rows import read_files

from recipes_lib.data import store
from recipes_lib.errors import DataError
from recipes_lib.files import is_locked

KEY = "0123456789abcdef" * 4
MANIFEST = {"train": {"num_rows": 40}}


def table(num_rows: int = 40, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 70_000, length).astype(np.uint32) for length in rng.integers(1, 30, num_rows)]
    return pa.table({"input_ids": pa.array(ids, pa.list_(pa.uint32())), "row_id": np.arange(num_rows)})


def write(root: Path, **changes: pa.Table) -> store.PreparedSet:
    """Write and publish a set, without a lock or a look for an existing one."""
    tables = {"train": table(), "eval": table(5, 1), **changes}
    staging = store.choose_staging(root, KEY, is_kept=False)
    store.write_splits(staging, {split: rows.to_reader(max_chunksize=7) for split, rows in tables.items()})
    return store.publish_set(staging, root, KEY, MANIFEST)


def build(staging: Path) -> dict[str, object]:
    store.write_splits(staging, {"train": table().to_reader()})
    return {"train": {"num_rows": 40}}


def test_published_set_reads_back_unchanged(tmp_path):
    written = write(tmp_path)
    found = store.find_set(tmp_path, KEY, check_bytes=True)
    assert (found.path, found.key, found.manifest) == (written.path, KEY, MANIFEST)
    assert written.is_new
    assert not found.is_new
    for split, rows in ((found.train, table()), (found.eval, table(5, 1))):
        assert [row["input_ids"].tolist() for row in split] == rows["input_ids"].to_pylist()


def test_eval_split_is_none_without_held_out_rows(tmp_path):
    assert store.make_set(tmp_path, KEY, {}, build).eval is None


def test_make_set_builds_once_and_records_inputs(tmp_path):
    first = store.make_set(tmp_path, KEY, {"seed": 1}, build)
    second = store.make_set(tmp_path, KEY, {"seed": 1}, lambda _: pytest.fail("built again"))
    assert (first.is_new, second.is_new) == (True, False)
    assert first.manifest == second.manifest == {"key": KEY, "inputs": {"seed": 1}, "train": {"num_rows": 40}}


@pytest.mark.parametrize("resumes", [False, True])
def test_interrupted_build_keeps_staging_only_if_it_resumes(tmp_path, resumes):
    seen = []

    def stop(staging):
        seen.append(staging.exists())
        staging.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            store.make_set(tmp_path, KEY, {}, stop, resumes=resumes)
    assert seen == [False, resumes]
    assert store.find_set(tmp_path, KEY) is None
    assert [path.is_dir() for path in tmp_path.iterdir()].count(True) == resumes


def test_publish_set_seals_all_visible_files(tmp_path):
    staging = store.choose_staging(tmp_path, KEY, is_kept=True)
    (staging / "sub").mkdir(parents=True)
    (staging / "sub" / "data.bin").write_bytes(b"data")
    (staging / ".progress").write_text("")
    (staging / "COMPLETE.json").write_text("{}")  # A killed process left it.
    published = store.publish_set(staging, tmp_path, KEY, MANIFEST)
    assert (published.path, published.manifest, published.is_new) == (tmp_path / KEY[:16], MANIFEST, True)
    assert not staging.exists()
    recorded = json.loads((published.path / "COMPLETE.json").read_text())["files"]
    assert set(recorded) == {"manifest.json", "sub/data.bin"}
    assert store.find_set(tmp_path, KEY, check_bytes=True)
    (published.path / "sub" / "data.bin").write_bytes(b"dat")
    assert store.find_set(tmp_path, KEY) is None


def test_hold_lock_removes_leftovers_but_resumable_staging(tmp_path):
    kept, *own = (store.choose_staging(tmp_path, KEY, is_kept=is_kept) for is_kept in (True, False, False))
    assert kept == store.choose_staging(tmp_path, KEY, is_kept=True)
    assert kept != store.choose_staging(tmp_path, "f" * 64, is_kept=True)
    assert len({kept, *own}) == 3
    for staging in (kept, *own):
        staging.mkdir()
    with store.hold_lock(tmp_path, KEY) as is_locked:
        assert is_locked
        assert [staging.exists() for staging in (kept, *own)] == [True, False, False]


def test_compute_key_ignores_key_order():
    assert store.compute_key({"a": 1, "b": [1, 2]}) == store.compute_key({"b": [1, 2], "a": 1})
    assert store.compute_key({"a": 1, "b": [1, 2]}) != store.compute_key({"a": 1, "b": [2, 1]})
    assert store.compute_key({"a": 1}) != store.compute_key({"a": "1"})


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/data.arrow", lambda content: content[:-1]),
        ("eval/data.arrow", None),
        ("COMPLETE.json", None),
        ("COMPLETE.json", lambda _: b'{"key":'),
        ("COMPLETE.json", lambda _: b"[]"),
        ("COMPLETE.json", lambda content: content.replace(KEY.encode(), KEY[:16].encode() + b"0" * 48)),
        ("manifest.json", lambda _: b""),
    ],
)
def test_damaged_set_is_logged_and_rebuilt(tmp_path, caplog, name, damage):
    path = write(tmp_path).path / name
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING):
        assert store.find_set(tmp_path, KEY) is None
    assert KEY[:16] in caplog.text
    write(tmp_path)
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None
    caplog.clear()
    assert store.find_set(tmp_path / "nowhere", KEY) is None
    assert not caplog.text


@pytest.mark.parametrize("function", ["files._open_regular", "data.store.hash_file"])
def test_set_on_a_failing_disk_is_not_built_again(tmp_path, monkeypatch, function):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(f"recipes_lib.{function}", fail)
        with pytest.raises(DataError, match="Input/output error\n    check the disk"):
            store.make_set(tmp_path, KEY, {}, lambda _: pytest.fail("it is built"), check_bytes=True)
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None


def test_damage_is_logged_once(tmp_path, caplog):
    (write(tmp_path).path / "train/data.arrow").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert store.make_set(tmp_path, KEY, {}, build).is_new
    assert len(caplog.records) == 1


@pytest.mark.parametrize("check_bytes", [False, True])
def test_changed_bytes_are_detected_with_check_bytes(tmp_path, check_bytes):
    first = store.make_set(tmp_path, KEY, {}, build)
    before = read_files(first.path)
    (first.path / "train/data.arrow").write_bytes(bytes(len(before["train/data.arrow"])))
    again = store.make_set(tmp_path, KEY, {}, build, check_bytes=check_bytes)
    assert again.is_new == check_bytes
    assert (read_files(again.path) == before) == check_bytes


def test_set_published_during_rename_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "other")
    replace = os.replace

    def publish_another_then_replace(source, target):
        if os.path.isdir(source):  # noqa: PTH112 - the set, not its records
            shutil.copytree(tmp_path / "other" / KEY[:16], target)
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", publish_another_then_replace)
    store.make_set(tmp_path / "root", KEY, {}, build)
    assert store.find_set(tmp_path / "root", KEY, check_bytes=True).manifest == MANIFEST
    assert {path.name for path in (tmp_path / "root").iterdir()} == {KEY[:16], f".{KEY[:16]}.lock"}


def lock_and_write(root: Path) -> None:
    with store.hold_lock(root, KEY):
        write(root)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("function", "call"), [("fsync", at) for at in range(1, 6)] + [("replace", at) for at in range(1, 4)]
)
def test_killed_writer_leaves_no_set_and_next_writer_cleans_up(tmp_path, function, call):
    kill_at_call(lambda: lock_and_write(tmp_path), store.os, function, call)
    assert store.find_set(tmp_path, KEY) is None
    assert list(tmp_path.glob(".*.tmp"))
    lock_and_write(tmp_path)
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("call", [1, 2, 3])
def test_publication_killed_at_a_rename_is_completed(tmp_path, call):
    def build_again(staging: Path) -> dict[str, object]:
        return MANIFEST if staging.exists() else build(staging)

    def make() -> store.PreparedSet:
        return store.make_set(tmp_path, KEY, {}, build_again, resumes=True)

    kill_at_call(make, store.os, "replace", call)
    assert store.find_set(tmp_path, KEY) is None
    assert {path.name for path in make().path.iterdir()} == {"COMPLETE.json", "manifest.json", "train"}
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "make the folder"), (errno.EIO, "check the disk")],
)
def test_disk_error_is_data_error_and_leaves_no_files(tmp_path, monkeypatch, failing, code, remedy):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.os, failing, fail)
    with pytest.raises(DataError) as raised:
        store.make_set(tmp_path, KEY, {}, build)
    assert os.strerror(code) in str(raised.value)
    assert remedy in str(raised.value)
    assert "prepared_dir" in str(raised.value)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(DataError, match=r"508 written\n    free some space"), store.explain_disk_errors(tmp_path):
        raise OSError("1708 requested and 508 written")  # By numpy, without an error number.


def test_root_that_is_a_file_is_data_error(tmp_path):
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(DataError, match="prepared_dir"), store.hold_lock(root, KEY):
        pass
    with pytest.raises(DataError, match="prepared_dir"):
        write(root)


def test_root_that_cannot_be_opened_has_remedy(tmp_path):
    # For the superuser, a name that no file system takes stands for a folder that may not be searched.
    with pytest.raises(DataError, match="set prepared_dir to another folder"):
        store.find_set(tmp_path / ("a" * 300), KEY)


def test_locks_of_different_keys_are_independent(tmp_path):
    keys = KEY, "f" * 64
    with store.hold_lock(tmp_path, keys[0]), store.hold_lock(tmp_path, keys[1]):
        assert all(is_locked(store._lock_path(tmp_path, key)) for key in keys)


def test_set_is_written_on_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    staging_of_another = tmp_path / f".{KEY[:16]}.other.tmp"
    staging_of_another.mkdir()
    with store.hold_lock(tmp_path, KEY) as is_locked:
        assert not is_locked
        write(tmp_path)
    assert store.find_set(tmp_path, KEY) is not None
    assert staging_of_another.exists(), "a living process may be writing there"

"""A prepared set is there whole or not at all, and what is read is what was written."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from recipes_lib.data.packed import store
from recipes_lib.data.packed.packing import Bins, Examples, build_examples, choose_bins, pack_best_fit
from recipes_lib.data.sources.rows import EncodedRow
from recipes_lib.errors import DataError

KEY = "0123456789abcdef" * 4
MANIFEST = {"train": {"num_rows": 40}}


def packed(num_rows: int = 40, seed: int = 0) -> tuple[Examples, Bins]:
    rng = np.random.default_rng(seed)
    rows = [
        EncodedRow(rng.integers(0, 70_000, length).astype(np.uint32), rng.random(length) < 0.5)
        for length in rng.integers(1, 30, num_rows)
    ]
    examples = build_examples(rows, np.arange(num_rows))
    return examples, pack_best_fit(examples.lengths, 32)


def write(root: Path, **changes) -> store.PreparedSet:
    return store.write_set(root, KEY, {"train": packed(), "eval": packed(5, 1), **changes}, MANIFEST)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("packs_per_record_batch", [1, 3, 1000])
def test_what_is_read_is_what_was_packed(tmp_path, monkeypatch, packs_per_record_batch):
    monkeypatch.setattr(store, "_PACKS_PER_RECORD_BATCH", packs_per_record_batch)
    examples, bins = packed()
    written = write(tmp_path)
    found = store.find_set(tmp_path, KEY, check_bytes=True)
    assert (found.path, found.key, found.manifest) == (written.path, KEY, MANIFEST)
    assert written.is_new
    assert not found.is_new
    assert len(found.train) == len(bins)
    for pack, start, stop in zip(found.train, bins.offsets, bins.offsets[1:], strict=False):
        members = bins.order[start:stop]
        alone = [examples.take(np.array([member])) for member in members]
        assert pack["input_ids"].tolist() == [token for one in alone for token in one.input_ids.tolist()]
        assert pack["loss_mask"].tolist() == [flag for one in alone for flag in one.loss_mask.tolist()]
        assert pack["seq_lengths"].tolist() == examples.lengths[members].tolist()
        assert pack["row_ids"].tolist() == examples.row_ids[members].tolist()


def test_nothing_held_out_reads_as_none(tmp_path):
    examples, _ = packed(3)
    assert (
        store.write_set(tmp_path, KEY, {"train": (examples, choose_bins(examples.lengths, 32, packing=False))}, {}).eval
        is None
    )


def test_the_same_set_is_the_same_bytes(tmp_path):
    assert contents(write(tmp_path / "one").path) == contents(write(tmp_path / "two").path)


def test_nothing_but_the_set_stays_in_the_folder(tmp_path):
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [KEY[:16]]


def test_a_folder_that_was_filled_elsewhere_is_published_whole(tmp_path):
    staging = store.choose_staging(tmp_path, KEY, is_kept=True)
    (staging / "sub").mkdir(parents=True)
    (staging / "sub" / "data.bin").write_bytes(b"data")
    (staging / ".progress").write_text("")
    published = store.publish_set(staging, tmp_path, KEY, MANIFEST)
    assert (published.path, published.manifest, published.is_new) == (tmp_path / KEY[:16], MANIFEST, True)
    assert not staging.exists()
    sealed = json.loads((published.path / "COMPLETE.json").read_text())["files"]
    assert set(sealed) == {"manifest.json", "sub/data.bin"}
    assert store.find_set(tmp_path, KEY, check_bytes=True)
    (published.path / "sub" / "data.bin").write_bytes(b"dat")
    assert store.find_set(tmp_path, KEY) is None


def test_who_holds_the_lock_keeps_the_folder_that_is_gone_on_with_and_no_other(tmp_path):
    kept, *own = (store.choose_staging(tmp_path, KEY, is_kept=is_kept) for is_kept in (True, False, False))
    assert kept == store.choose_staging(tmp_path, KEY, is_kept=True)
    assert kept != store.choose_staging(tmp_path, "f" * 64, is_kept=True)
    assert len({kept, *own}) == 3
    for staging in (kept, *own):
        staging.mkdir()
    with store.hold_lock(tmp_path, KEY) as is_locked:
        assert is_locked
        assert [staging.exists() for staging in (kept, *own)] == [True, False, False]


def test_the_key_depends_on_values_and_not_on_their_order():
    assert store.compute_key({"a": 1, "b": [1, 2]}) == store.compute_key({"b": [1, 2], "a": 1})
    assert store.compute_key({"a": 1, "b": [1, 2]}) != store.compute_key({"a": 1, "b": [2, 1]})
    assert store.compute_key({"a": 1}) != store.compute_key({"a": "1"})


def truncate(path: Path) -> None:
    (path / "train/data.arrow").write_bytes((path / "train/data.arrow").read_bytes()[:-1])


def remove_data(path: Path) -> None:
    (path / "eval/data.arrow").unlink()


def remove_marker(path: Path) -> None:
    (path / "COMPLETE.json").unlink()


def break_marker(path: Path) -> None:
    (path / "COMPLETE.json").write_text('{"key":')


def empty_marker(path: Path) -> None:
    (path / "COMPLETE.json").write_text("[]")


def replace_by_another_set(path: Path) -> None:
    marker = json.loads((path / "COMPLETE.json").read_text())
    (path / "COMPLETE.json").write_text(json.dumps(marker | {"key": KEY[:16] + "0" * 48}))


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("")


DAMAGES = [truncate, remove_data, remove_marker, break_marker, empty_marker, replace_by_another_set, cut_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_set_is_named_not_loaded_and_made_again(tmp_path, caplog, damage):
    damage(write(tmp_path).path)
    with caplog.at_level(logging.WARNING):
        assert store.find_set(tmp_path, KEY) is None
    assert KEY[:16] in caplog.text
    write(tmp_path)
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None


def test_a_changed_byte_is_found_when_bytes_are_checked(tmp_path):
    file = write(tmp_path).path / "train/data.arrow"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert store.find_set(tmp_path, KEY) is not None
    assert store.find_set(tmp_path, KEY, check_bytes=True) is None


def test_an_absent_set_is_no_matter_for_a_warning(tmp_path, caplog):
    assert store.find_set(tmp_path / "nowhere", KEY) is None
    assert not caplog.text


def test_the_set_published_first_is_kept(tmp_path):
    first = write(tmp_path)
    before = contents(first.path)
    store.write_set(tmp_path, KEY, {"train": packed(7, 3)}, {})
    assert contents(first.path) == before


def test_a_set_published_at_the_last_moment_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "other")
    replace = os.replace

    def publish_another_then_replace(source, target):
        shutil.copytree(tmp_path / "other" / KEY[:16], target)
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", publish_another_then_replace)
    write(tmp_path / "root")
    assert store.find_set(tmp_path / "root", KEY, check_bytes=True) is not None
    assert [path.name for path in (tmp_path / "root").iterdir()] == [KEY[:16]]


def kill_at_call(root: Path, function: str, call: int) -> None:
    """Writes a set in a process that dies at the given call of an ``os`` function."""
    original, calls = getattr(os, function), 0

    def die(*args):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(store.os, function, die)
    with store.hold_lock(root, KEY):
        write(root)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("function", "call"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("fsync", 4), ("fsync", 5), ("replace", 1)]
)
def test_a_killed_writer_leaves_no_set_and_the_next_one_cleans_up(tmp_path, function, call):
    process = multiprocessing.get_context("fork").Process(target=kill_at_call, args=(tmp_path, function, call))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert store.find_set(tmp_path, KEY) is None
    assert list(tmp_path.glob(".*.tmp"))
    with store.hold_lock(tmp_path, KEY):
        write(tmp_path)
    assert store.find_set(tmp_path, KEY, check_bytes=True) is not None
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "make the folder")])
def test_a_disk_error_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch, failing, code, remedy):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.os, failing, fail)
    with pytest.raises(DataError) as raised:
        write(tmp_path)
    assert os.strerror(code) in str(raised.value)
    assert remedy in str(raised.value)
    assert "prepared_dir" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_one_clear_error(tmp_path):
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(DataError, match="prepared_dir"), store.hold_lock(root, KEY):
        pass
    with pytest.raises(DataError, match="prepared_dir"):
        write(root)


def test_who_waits_for_the_lock_goes_on_when_it_is_free(tmp_path):
    events: list[str] = []
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        with store.hold_lock(tmp_path, KEY):
            entered.set()
            release.wait()
            events.append("first")

    def follow() -> None:
        with store.hold_lock(tmp_path, KEY):
            events.append("second")

    threads = [threading.Thread(target=hold), threading.Thread(target=follow)]
    threads[0].start()
    entered.wait()
    assert store.is_locked(tmp_path, KEY)
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join()
    assert events == ["first", "second"]
    assert not store.is_locked(tmp_path, KEY)


def test_locks_of_other_keys_do_not_wait(tmp_path):
    with store.hold_lock(tmp_path, KEY), store.hold_lock(tmp_path, "f" * 64):
        assert not store.is_locked(tmp_path, "e" * 64)


def test_without_file_locks_the_work_goes_on(tmp_path, monkeypatch):
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

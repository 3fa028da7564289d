"""File I/O: atomic replacement, locks, hashes, and JSON records read as untrusted input."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import stat
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from tests.forked import run_python

from recipes_lib.errors import ConfigError, DataError
from recipes_lib.files import (
    atomic_file,
    atomic_folder,
    explain_write_errors,
    find_record,
    flatten_numbers,
    fsync,
    hash_file,
    is_inside,
    is_locked,
    link_or_copy,
    parse_number,
    read_lines,
    read_record,
    replace_record,
    spell_numbers,
    try_lock,
)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[1, 2]", "is a list instead of an object"),
        (b"null", "is null instead of an object"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "is not JSON"),
        (b'{"b": 1}', "`a` is missing"),
        (b'{"a": "1"}', "`a` is a string"),
        (b'{"a": true}', "`a` is a boolean"),
    ],
)
def test_read_record_rejects_invalid_record_with_path(tmp_path, content, found) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_record(path, {"a": int}, remedy="put it back")
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert found in problem.found
    assert problem.remedy == "put it back"


def test_find_record_is_empty_without_a_valid_record(tmp_path) -> None:
    path = tmp_path / "record.json"
    assert find_record(path) == {}
    for text, found in (('{"a": 1}', {"a": 1}), ('{"a":', {}), ("[1]", {}), ("null", {})):
        path.write_text(text)
        assert find_record(path) == found


def test_read_record_rejects_non_regular_files_without_blocking(tmp_path) -> None:
    pipe, sparse, loop = tmp_path / "pipe", tmp_path / "sparse", tmp_path / "loop"
    os.mkfifo(pipe)
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    loop.symlink_to(loop)
    for path in (tmp_path, pipe, sparse, loop, Path("/dev/zero"), tmp_path / "missing", tmp_path / "a\0b"):
        with pytest.raises(DataError, match="cannot be read"):
            read_record(path)
    assert list(read_lines(pipe)) == []


def test_optional_field_may_be_missing(tmp_path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"a": 1}')
    assert read_record(path, {"a": int, "b": str | None}) == {"a": 1}


def test_read_lines_yields_none_for_invalid_lines(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"text": "a\xe2\x80\xa8b"}\n[1]\n{"step": \xff\n' + b"[" * 100_000 + b'\n{"step"')
    assert list(read_lines(path)) == [{"step": 1}, {"text": "a\u2028b"}, None, None, None, None]
    assert list(read_lines(tmp_path / "missing")) == []
    path.write_bytes(b'\xef\xbb\xbf{"step": 1}\r\n{"step": 2}\r\n')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_read_lines_raises_if_disk_fails_after_opening() -> None:
    """What was read before must not pass for the whole file."""
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        list(read_lines(Path("/proc/self/mem")))  # A regular file, whose first page cannot be read.


def test_error_of_hash_names_file() -> None:
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        hash_file(Path("/proc/self/mem"))


def test_read_lines_bounds_line_length_not_file_size(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recipes_lib.files.MAX_BYTES", 32)
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n' * 10 + "x" * 100 + '\n{"step": 2}\n')
    assert list(read_lines(path)) == [{"step": 1}] * 10 + [None] * 4 + [{"step": 2}]
    with pytest.raises(DataError, match="exceeds the limit"):
        read_record(path)


def test_non_finite_numbers_round_trip(tmp_path) -> None:
    record = {
        "loss": float("nan"),
        "losses": [float("-inf"), 1.5],
        "norms": {"a": float("inf")},
        "step": 3,
        "name": "x",
    }
    text = json.dumps(spell_numbers(record), allow_nan=False)
    assert text == '{"loss": "nan", "losses": ["-inf", 1.5], "norms": {"a": "inf"}, "step": 3, "name": "x"}'
    assert parse_number(json.loads(text)["losses"][0]) == float("-inf")
    assert [parse_number(value) for value in (1.5, 3, "1", True, None, [1])] == [1.5, 3, None, None, None, None]


def test_numbers_of_a_nested_record_have_dotted_names() -> None:
    record = {"a": 1, "b": {"c": "nan", "d": {"e": 0.5}, "name": "x"}, "on": True, "list": [1]}
    assert str(dict(flatten_numbers(record))) == "{'a': 1, 'b.c': nan, 'b.d.e': 0.5}"


def test_replace_record_is_atomic(tmp_path, monkeypatch) -> None:
    path = tmp_path / "record.json"
    replace_record(path, {"a": "ü", "path": tmp_path, "name": "\udcff"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü", "path": str(tmp_path), "name": "\udcff"}

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        replace_record(path, {"a": "new"})
    assert caught.value.filename == str(path)
    assert read_record(path)["a"] == "ü"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_failed_write_names_the_file(tmp_path, is_shared) -> None:
    limits, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "file"
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught, atomic_file(path, is_shared=is_shared) as unfinished:
            unfinished.write_bytes(bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))


def test_failed_write_without_a_reason_of_the_system_has_that_of_the_library(tmp_path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot be written: encoder error -2"),
        explain_write_errors(tmp_path, "name another folder"),
    ):
        raise OSError("encoder error -2 when writing image file")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EIO, errno.ENOSPC])
def test_file_system_may_lack_flushes_but_must_not_fail_them(tmp_path, monkeypatch, code) -> None:
    (tmp_path / "file").touch()

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    for path in (tmp_path, tmp_path / "file"):
        failed = code in (errno.EIO, errno.ENOSPC)
        # With the path, which the system's error lacks.
        with pytest.raises(OSError, match=f"{os.strerror(code)}: '{path}'") if failed else nullcontext():
            fsync(path)


@pytest.mark.parametrize("of_process", [False, True])
def test_exclusive_lock_blocks_other_process_until_closed(tmp_path, of_process) -> None:
    path = tmp_path / "lock"
    program = f"""from pathlib import Path
from recipes_lib.files import is_locked, try_lock
path = Path({str(path)!r})
print(is_locked(path, of_process={of_process}), try_lock(path.open("a"), of_process={of_process}))"""
    assert run_python(program) == "False True\n", "there is no file"
    with path.open("a") as file:
        assert try_lock(file, of_process=of_process) is True
        assert run_python(program) == "True False\n"
    assert run_python(program) == "False True\n"


def test_lock_of_a_deleted_file_is_refused(tmp_path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as late:
        path.unlink()  # By its last owner, after this process has opened it.
        with path.open("a") as file:
            assert try_lock(file) is True
            assert try_lock(late) is False


def test_shared_lock_excludes_exclusive_lock(tmp_path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as first, path.open() as second, path.open("a") as third:
        assert try_lock(first, is_shared=True) is True
        assert try_lock(second, is_shared=True) is True
        assert try_lock(third) is False


def test_holder_of_lock_is_unknown_without_lock_support(tmp_path, monkeypatch) -> None:
    def refuse(file, operation) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as file:
        assert try_lock(file) is None
    assert is_locked(tmp_path / "lock") is None
    os.mkfifo(tmp_path / "pipe")  # Opening it would block.
    assert is_locked(tmp_path / "pipe") is None


def test_hash_file_accepts_path_and_open_file(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    with path.open("rb") as file:
        assert hash_file(path) == hash_file(file) == hashlib.sha256(b"bytes").hexdigest()


@pytest.mark.parametrize(
    ("name", "inside"),
    [("model.safetensors", True), ("a/b.pt", True), ("../x", False), ("a/../../x", False), ("/dev/zero", False)],
)
def test_is_inside_rejects_paths_outside_folder(name, inside) -> None:
    assert is_inside(name) is inside
    assert not is_inside(7)


def test_link_or_copy_falls_back_to_copy(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "x"
    assert not (tmp_path / "a").samefile(tmp_path / "c")


def test_atomic_file_replaces_after_successful_block_only(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    (tmp_path / "a.partial").write_text("of a killed process")
    with atomic_file(path) as first, atomic_file(tmp_path / "b") as second:
        first.write_text("new")
        second.write_text("other")
        assert path.read_text() == "old"
        assert first.parent == path.parent
    assert (path.read_text(), (tmp_path / "b").read_text()) == ("new", "other")
    inode = path.stat().st_ino
    with pytest.raises(ValueError, match="midway"), atomic_file(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise ValueError("midway")
    assert (path.read_text(), path.stat().st_ino) == ("new", inode)
    with atomic_file(path) as partial:
        partial.write_text("newer")
    # A new inode: a reader that has the old file open reads it to its end.
    assert path.stat().st_ino != inode
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    with atomic_file(path, is_shared=True) as one, atomic_file(path, is_shared=True) as another:
        one.write_text("one")
        another.write_text("another")
    assert path.read_text() == "one"
    tmp_path.chmod(0o755)
    with atomic_file(path) as partial:
        partial.touch(0o600)  # As safetensors 0.8 creates it.
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left on device (os error 28)")]
)
def test_full_disk_of_an_error_without_a_file_is_that_of_the_atomic_folder(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/model: the disk is full"), atomic_folder(tmp_path / "model"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_is_renamed_after_successful_block_only(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "model"
    with suppress(ValueError), atomic_folder(folder) as staging:
        (staging / "weights").write_text("half")
        raise ValueError
    assert list(folder.parent.iterdir()) == []
    staging.mkdir()
    (staging / "of-a-killed-process").touch()
    with atomic_folder(folder) as staging:
        (staging / "weights").write_text("whole")
        (staging / "weights").chmod(0o600)  # As safetensors 0.8 leaves it.
        assert not folder.exists()
        with pytest.raises(ConfigError, match="is being written by another process"), atomic_folder(folder):
            pass
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert [file.read_text() for file in folder.iterdir()] == ["whole"]
    readers = stat.S_IRGRP | stat.S_IROTH
    assert (folder / "weights").stat().st_mode & readers == folder.stat().st_mode & readers
    # Before the work, which would be lost.
    refused = {
        folder: "is not empty",
        Path("/proc/model"): "cannot be written",
        Path("/"): "is not empty|cannot be written",
    }
    for place, found in refused.items():
        with pytest.raises(ConfigError, match=found), atomic_folder(place):
            pytest.fail("the block has begun")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with atomic_folder(tmp_path / "link") as staging:
        (staging / "weights").touch()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "weights").is_file()

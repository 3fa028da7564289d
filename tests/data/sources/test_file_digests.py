"""A remembered digest is that of the bytes that are there now, or it is not used."""

import hashlib
import os
import time

import pytest

from recipes_lib.data.sources import local_files
from recipes_lib.data.sources.local_files import compute_digest


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that counts as large, and settled by now."""
    monkeypatch.setattr(local_files, "MIN_BYTES", 10)
    monkeypatch.setattr(local_files, "_SETTLED_NS", -1)
    path = tmp_path / "rows with spaces.jsonl"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
def num_reads(monkeypatch):
    """How often a file was read whole."""
    reads = []
    monkeypatch.setattr(
        local_files.hashlib, "file_digest", lambda file, kind: reads.append(1) or hashlib.new(kind, file.read())
    )
    return reads


def sha256(path):
    return hashlib.sha256(path.read_bytes()).digest()


def test_a_large_file_is_read_once(large, tmp_path, num_reads):
    digests = [compute_digest(large, tmp_path / "cache") for _ in range(3)]
    assert digests == [sha256(large)] * 3
    assert len(num_reads) == 1


def test_a_small_file_is_read_every_time(large, tmp_path, num_reads):
    large.write_bytes(b"012345678")
    assert [compute_digest(large, tmp_path / "cache") for _ in range(2)] == [sha256(large)] * 2
    assert len(num_reads) == 2
    assert not (tmp_path / "cache").exists()


def test_other_bytes_of_the_same_size_at_the_same_time_are_found(large, tmp_path):
    compute_digest(large, tmp_path / "cache")
    times = large.stat()
    large.write_bytes(b"9876543210")
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert compute_digest(large, tmp_path / "cache") == sha256(large)


def test_another_file_of_the_same_name_is_found(large, tmp_path):
    compute_digest(large, tmp_path / "cache")
    other = tmp_path / "other"
    other.write_bytes(b"9876543210")
    other.replace(large)
    assert compute_digest(large, tmp_path / "cache") == sha256(large)


def test_a_file_that_has_just_changed_is_not_remembered(large, tmp_path, num_reads, monkeypatch):
    monkeypatch.setattr(local_files, "_SETTLED_NS", 2 * 10**9)
    os.utime(large)
    assert time.time_ns() - large.stat().st_ctime_ns < 2 * 10**9
    compute_digest(large, tmp_path / "cache")
    compute_digest(large, tmp_path / "cache")
    assert len(num_reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": 1}', '{"sha256": "zz"}', "null"])
def test_a_damaged_memory_is_forgotten(large, tmp_path, content):
    compute_digest(large, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_text(content)
    assert compute_digest(large, tmp_path / "cache") == sha256(large)


def test_a_cache_that_cannot_be_written_is_done_without(large, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert compute_digest(large, tmp_path / "cache") == sha256(large)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        compute_digest(tmp_path / "nothing")

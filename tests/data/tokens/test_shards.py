"""Token shards: round trip, resumed writers, fsync, and reading from other processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forked import limit_forked
from tests.rows import read_files

from recipes_lib.data.tokens import shards as token_shards
from recipes_lib.data.tokens.shards import TokenSource, TokenWriter, is_whole

NUM_IDS = 1000
lengths_lists = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Shards of 32 bytes, and no fsync."""
    monkeypatch.setattr(token_shards, "SHARD_BYTES", 32)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def make_documents(lengths: list[int], seed: int = 0, num_ids: int = NUM_IDS) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, num_ids, sum(lengths)).astype(np.uint32)
    return ids, np.array(lengths, np.int64), rng.integers(0, 2**64, len(lengths), np.uint64)


def append(writer: TokenWriter, documents: tuple[np.ndarray, ...], start: int, stop: int) -> None:
    ids, lengths, digests = documents
    ends = np.concatenate([[0], np.cumsum(lengths)])
    writer.append(ids[ends[start] : ends[stop]], lengths[start:stop], digests[start:stop])


def write(folder: Path, documents: tuple[np.ndarray, ...], cuts=(), num_ids: int = NUM_IDS) -> TokenSource:
    borders = [0, *sorted(cuts), len(documents[1])]
    with TokenWriter(folder, num_ids=num_ids) as writer:
        for start, stop in itertools.pairwise(borders):
            append(writer, documents, start, stop)
        return TokenSource("a source", folder, **writer.describe())


@settings(max_examples=40)
@given(lengths_lists, st.data())
def test_any_range_reads_back_appended_tokens(tmp_path_factory, lengths, data):
    documents = make_documents(lengths)
    source = write(tmp_path_factory.mktemp("shards") / "s", documents)
    ids, _, digests = documents
    ends = np.cumsum(lengths)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
    assert source.read(start, stop).dtype == np.uint32
    assert source.read(start, stop).tolist() == ids[start:stop].tolist()
    document_of = np.repeat(np.arange(len(lengths)), lengths)[start:stop]
    pieces = [int((document_of == document).sum()) for document in np.unique(document_of)]
    assert source.read_document_lengths(start, stop).tolist() == pieces
    assert (source.num_tokens, source.num_documents) == (ends[-1], len(lengths))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(lengths))] * 2)))
    assert source.digests[first:last].tolist() == digests[first:last].tolist()


@settings(max_examples=40)
@given(lengths_lists, st.data())
def test_shard_bytes_are_independent_of_append_calls(tmp_path_factory, lengths, data):
    folder, documents = tmp_path_factory.mktemp("shards"), make_documents(lengths)
    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=5))
    write(folder / "at once", documents)
    write(folder / "in parts", documents, cuts)
    assert read_files(folder / "at once") == read_files(folder / "in parts")


@pytest.mark.parametrize(("num_ids", "dtype"), [(2, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (200_000, "<u4")])
def test_ids_use_two_bytes_if_they_fit(tmp_path, num_ids, dtype):
    documents = make_documents([30, 40], num_ids=num_ids)
    documents[0][7] = num_ids - 1
    source = write(tmp_path / "s", documents, num_ids=num_ids)
    shards = sorted(tmp_path.glob("s/tokens-*.bin"))
    assert source.dtype == dtype
    assert [path.stat().st_size for path in shards[:-1]] == [32] * (len(shards) - 1)
    assert np.concatenate([np.fromfile(path, dtype) for path in shards]).tolist() == documents[0].tolist()
    assert source.read(0, 70).tolist() == documents[0].tolist()


def test_out_of_range_read_raises(tmp_path):
    source = write(tmp_path / "s", make_documents([5]))
    for start, stop in ((-1, 2), (0, 6), (3, 2)):
        with pytest.raises(AssertionError):
            source.read(start, stop)


def test_no_folder_without_documents(tmp_path):
    with TokenWriter(tmp_path / "s", num_ids=9) as writer:
        writer.append(*make_documents([]))
        writer.flush()
    assert writer.describe()["num_documents"] == 0
    assert is_whole(tmp_path / "s", writer.describe(), exactly=True)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40)
@given(lengths_lists, st.data())
def test_resumed_writer_equals_uninterrupted_writer(tmp_path_factory, lengths, data):
    folder, documents = tmp_path_factory.mktemp("shards"), make_documents(lengths)
    flushed, written = sorted(data.draw(st.tuples(*[st.integers(0, len(lengths))] * 2)))
    write(folder / "whole", documents)
    with TokenWriter(folder / "resumed", num_ids=NUM_IDS) as writer:
        append(writer, documents, 0, flushed)
        writer.flush()
        at = writer.describe()
        append(writer, documents, flushed, written)
    with TokenWriter(folder / "resumed", num_ids=NUM_IDS, at=at) as writer:
        append(writer, documents, flushed, len(lengths))
    assert read_files(folder / "whole") == read_files(folder / "resumed")


def test_truncated_flush_is_detected(tmp_path):
    write(tmp_path / "s", make_documents([20, 30, 1]))
    with TokenWriter(tmp_path / "s", num_ids=NUM_IDS) as writer:
        append(writer, make_documents([20, 30, 1]), 0, 3)
        writer.flush()
        at = writer.describe()
        assert is_whole(tmp_path / "s", at)
        assert is_whole(tmp_path / "s", at, exactly=True)
    for path in (tmp_path / "s").iterdir():
        content = path.read_bytes()
        path.write_bytes(content + b"later")
        assert is_whole(tmp_path / "s", at)
        assert not is_whole(tmp_path / "s", at, exactly=True)
        path.write_bytes(content[:-1])
        assert not is_whole(tmp_path / "s", at)
        assert not is_whole(tmp_path / "s", at, exactly=True)
        path.unlink()
        assert not is_whole(tmp_path / "s", at)
        path.write_bytes(content)


def test_flush_syncs_files_and_directory(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    with TokenWriter(tmp_path / "s", num_ids=NUM_IDS) as writer:
        append(writer, make_documents([20, 30, 1]), 0, 3)
        writer.flush()
    assert synced == {tmp_path / "s", *(tmp_path / "s").iterdir()}


def test_full_shards_do_not_grow(tmp_path):
    with TokenWriter(tmp_path / "s", num_ids=NUM_IDS) as writer:
        counts = []
        for number in range(4):
            append(writer, make_documents([8] * 4), number, number + 1)
            counts.append(writer.num_full_shards)
    assert counts == [0, 1, 1, 2]


def read_all(source: TokenSource, connection) -> None:
    limit_forked()
    connection.send(source.read(0, source.num_tokens).tolist())


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_process_reads_equal_tokens(tmp_path, method):
    source = write(tmp_path / "s", make_documents([20, 30]))
    expected = source.read(0, 50).tolist()
    assert pickle.loads(pickle.dumps(source)) == source
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=read_all, args=(source, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == expected
    process.join()
    assert process.exitcode == 0


def read_with_few_files(source: TokenSource) -> None:
    limit_forked()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # In addition to the files that earlier tests left open in this process.
    few = len(list(Path("/dev/fd").iterdir())) + token_shards._MAX_OPEN_FILES + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    for start in range(0, source.num_tokens, 16):
        source.read(start, start + 16)


@pytest.mark.multiprocess
def test_num_shards_may_exceed_open_file_limit(tmp_path):
    source = write(tmp_path / "s", make_documents([16] * 400))
    process = multiprocessing.get_context("fork").Process(target=read_with_few_files, args=(source,))
    process.start()
    process.join()
    assert process.exitcode == 0

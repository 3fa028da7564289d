"""Encoding of a mixture in chunks: order, remarks, collected problems, and the token file."""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed import encoding
from recipes_lib.data.packed.encoding import (
    TokenFile,
    build_encoder,
    encode_chunk,
    encode_mixture,
    map_chunks,
    split_chunks,
)
from recipes_lib.data.packed.packing import build_examples, concatenate_examples
from recipes_lib.data.sources.mixtures import load_train_data
from recipes_lib.data.sources.rows import BrokenRows, EncodedRow, Remark, Row, find_remarked
from recipes_lib.data.sources.splits import compute_row_digest
from recipes_lib.errors import DataError, Problem


@pytest.fixture
def encode(tmp_path, monkeypatch):
    """Encode the rows of a run; return them, the problems, and the totals of rows and tokens after each chunk."""
    with TokenFile(tmp_path) as file:

        def encode(config, tokenizer):
            broken, counts = BrokenRows(config.tokens), []
            mixture, encoder = load_train_data(config.data), build_encoder(config, tokenizer)

            def encode_rows(rows, row_ids):
                return encode_chunk(encoder, rows, row_ids), {"row_ids": np.array(row_ids, np.int64)}

            monkeypatch.setattr(encoding, "show_progress", lambda _: nullcontext(lambda *pair: counts.append(pair)))
            encoded = encode_mixture(encode_rows, mixture, broken, file, None)
            assert encoded.columns["row_ids"].tolist() == encoded.examples.row_ids.tolist()
            return encoded, broken.list_problems(mixture.name), counts

        yield encode


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 40, 1000])
def test_encoding_is_independent_of_chunk_size(build_config, encode, tiny_tokenizer, monkeypatch, rows_per_chunk):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", rows_per_chunk)
    config = build_config()
    encoded, problems, counts = encode(config, tiny_tokenizer)
    rows = list(load_train_data(config.data).rows())
    expected = RowEncoder(tiny_tokenizer).encode(rows)
    assert not problems
    assert counts[-1] == (len(rows), encoded.examples.lengths.sum())
    assert len(rows) == len(encoded.examples)
    assert encoded.examples.read()[0].tolist() == [token for row in expected for token in row.input_ids.tolist()]
    assert encoded.examples.read()[1].tolist() == [flag for row in expected for flag in row.loss_mask.tolist()]
    assert encoded.examples.row_ids.tolist() == list(range(len(rows)))
    assert encoded.digests.tobytes() == b"".join(compute_row_digest(row) for row in rows)


def test_rows_are_tokenised_once(build_config, encode, tiny_tokenizer, tokenized):
    config = build_config()
    before = sum(tokenized)
    encode(config, tiny_tokenizer)
    assert sum(tokenized) - before == 40


@pytest.mark.parametrize("rows_per_chunk", [7, 1000])
def test_remarks_stay_with_their_rows(
    build_config, write_rows, make_chats, encode, tiny_tokenizer, monkeypatch, rows_per_chunk
):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", rows_per_chunk)
    rows = make_chats(20)
    for number in (3, 16):
        rows[number]["messages"][1]["reasoning_content"] = "because"
    path = write_rows(rows=rows)
    encoded, problems, _ = encode(build_config(dataset_name=str(path)), tiny_tokenizer)
    assert not problems
    assert find_remarked(encoded.examples.remarks)[Remark.LOST_REASONING].tolist() == [3, 16]
    taken = encoded.take(np.array([5, 16]))
    assert find_remarked(taken.examples.remarks)[Remark.LOST_REASONING].tolist() == [1]
    assert taken.find_places([1]) == {1: f"{path}:17"}


def test_find_places_returns_row_locations(build_config, encode, tiny_tokenizer):
    config = build_config()
    encoded, _, _ = encode(config, tiny_tokenizer)
    taken = encoded.take(np.array([30, 4, 9]))
    name = config.data.dataset_name
    assert taken.find_places([0, 2]) == {0: f"{name}:31", 2: f"{name}:10"}
    assert taken.digests.tolist() == [encoded.digests[at] for at in (30, 4, 9)]
    assert taken.mixture.name == name


def test_row_without_tokens_is_refused():
    class Silent:
        def encode(self, rows):
            return [EncodedRow(np.zeros(0, np.uint32), np.zeros(0, np.bool_)) for _ in rows]

    with pytest.raises(DataError, match="data row 5: the row has no token"):
        encode_chunk(Silent(), [Row(where="data row 5", text="x")], [0])


def test_rows_before_broken_row_are_kept():
    rows = [Row(where=f"data row {number}", text="x") for number in range(3)]

    def read():
        yield from rows
        raise DataError(Problem("data row 3", "broken"))

    broken = BrokenRows()
    assert list(split_chunks(read(), broken)) == [rows]
    assert [problem.where for problem in broken.fatal] == ["data row 3"]


rows_of_tokens = st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9))


@settings(max_examples=40)
@given(st.lists(rows_of_tokens, max_size=4), st.randoms())
def test_token_file_reads_equal_memory_in_any_order(tmp_path_factory, chunks, random):
    def build(rows):
        encoded = [
            EncodedRow(np.array([id_ for id_, _ in row], np.uint32), np.array([is_target for _, is_target in row]))
            for row in rows
        ]
        return build_examples(encoded, range(len(rows)))

    in_memory = build([row for rows in chunks for row in rows])
    order = np.array(random.sample(range(len(in_memory)), len(in_memory)), np.int64)
    with TokenFile(tmp_path_factory.mktemp("root")) as file:
        kept = concatenate_examples([file.keep(build([])), *(file.keep(build(rows)) for rows in chunks)])
        for chosen in (slice(None), order, order[: len(order) // 2]):
            for ours, expected in zip(kept.read(chosen), in_memory.read(chosen), strict=True):
                assert np.array_equal(ours, expected)
        assert kept.num_targets.tolist() == in_memory.num_targets.tolist()


def test_full_disk_is_data_error_in_token_file(tmp_path):
    examples = build_examples([EncodedRow(np.ones(100_000, np.uint32), np.ones(100_000, np.bool_))], [0])
    with TokenFile(tmp_path) as file:
        file._file.close()
        file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 - closed with the file of tokens
        with pytest.raises(DataError, match="free some space, or set prepared_dir"):
            file.keep(examples)


def test_memory_per_row_is_at_most_64_bytes_for_any_length(build_config, encode, tiny_tokenizer, write_rows):
    rows = [{"text": f"{number} " + "the baker opens " * 50} for number in range(40)]
    encoded, _, _ = encode(build_config(dataset_name=str(write_rows(rows=rows))), tiny_tokenizer)
    assert isinstance(encoded.examples.tokens, TokenFile)
    assert sum(array.nbytes for array in (encoded.digests, *encoded.examples.columns)) <= 64 * len(rows)
    assert encoded.examples.lengths.min() > 64


def test_token_file_is_unlinked(tmp_path):
    with TokenFile(tmp_path) as file:
        file.keep(build_examples([EncodedRow(np.ones(9, np.uint32), np.ones(9, np.bool_))], [0]))
        assert list(tmp_path.iterdir()) == []


def test_truncated_token_file_is_error(tmp_path):
    with TokenFile(tmp_path) as file:
        examples = file.keep(build_examples([EncodedRow(np.arange(9, dtype=np.uint32), np.ones(9, np.bool_))], [0]))
        assert examples.read(np.array([0]))[0].tolist() == list(range(9))
        file._file.truncate(8)
        with pytest.raises(DataError, match="has lost data"):
            examples.read(np.array([0]))


def test_objects_that_exist_are_not_collected_while_chunks_are_encoded(monkeypatch):
    rows, calls = [Row(where=f"d:{number}", text="a") for number in range(3)], []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    assert list(map_chunks(rows, lambda *_: calls.copy(), BrokenRows(), None)) == [["freeze"]]
    assert calls == ["freeze", "unfreeze"]

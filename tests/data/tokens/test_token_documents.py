"""Chunks of documents, and the choice of held-out documents by content and seed."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy as np
import pytest

from recipes_lib.data import workers
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed import encoding
from recipes_lib.data.packed.encoding import map_chunks
from recipes_lib.data.sources.rows import BrokenRows, Row
from recipes_lib.data.sources.splits import compute_row_digest
from recipes_lib.data.tokens.token_sets import build_hold_out, encode_documents
from recipes_lib.errors import ConfigError, DataError, Problem

TEXTS = [f"{number} bakers weigh flour" * (number % 5 + 1) for number in range(40)]

HOLD_NONE = build_hold_out((), None, 0)


def make_rows(texts=TEXTS) -> list[Row]:
    return [Row(where=f"d.txt:{line}", text=text) for line, text in enumerate(texts, start=1)]


def encode(rows, tokenizer, hold_out=HOLD_NONE):
    broken = BrokenRows()
    encode_rows = partial(encode_documents, RowEncoder(tokenizer, loss_on="all"), hold_out)
    return list(map_chunks(rows, encode_rows, broken, None)), broken.list_problems("d.txt")


def test_chunk_is_bounded_by_characters_for_any_layout(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "CHARACTERS_PER_CHUNK", 20)
    turns = [{"role": "user", "content": "Ten chars."}, {"role": "assistant", "content": "Ten more.."}]
    rows = [
        Row(where="d row 0", text="twenty characters...and more"),
        Row(where="d row 1", messages=turns),
        Row(where="d row 2", prompt="nine chars", completion="nine more.."),
        Row(where="d row 3", text="few"),
        Row(where="d row 4", text="few"),
    ]
    chunks, _ = encode(rows, tiny_tokenizer)
    assert [len(chunk.lengths) for chunk in chunks] == [1, 1, 1, 2]


def test_reading_is_bounded_by_pending_work(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", 2)
    num_read = itertools.count(1)
    rows = (Row(where=f"endless row {next(num_read)}", text="text") for _ in itertools.repeat(None))
    encode_rows = partial(encode_documents, RowEncoder(tiny_tokenizer, loss_on="all"), HOLD_NONE)
    chunks = map_chunks(rows, encode_rows, BrokenRows(), 2)
    for _ in range(5):
        next(chunks)
    chunks.close()
    assert next(num_read) <= 2 * (5 + workers.MIN_ITEMS)


def test_reading_and_tokenising_problems_are_raised_together(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", 3)
    texts = [*TEXTS[:4], "half a \ud800 pair", *TEXTS[5:10], "half a \ud800 pair"]

    def rows():
        yield from make_rows(texts)
        raise DataError(Problem("d.txt:90", "broken"), Problem("d.txt:91", "broken"))

    _, problems = encode(rows(), tiny_tokenizer)
    assert sorted(problem.where for problem in problems) == ["d.txt:5", "d.txt:90", "d.txt:91"]
    assert "so in 2 of 11 rows (18.2%), next d.txt:11" in problems[-1].found


def test_tokenizer_error_is_not_row_problem(tiny_tokenizer):
    class Unfit:
        def encode(self, rows):
            raise ConfigError(Problem("eos_token", "none"))

    with pytest.raises(ConfigError):
        list(map_chunks(make_rows(), partial(encode_documents, Unfit(), HOLD_NONE), BrokenRows(), None))


def held_out_texts(rows, size, seed=0) -> list[str]:
    rule = build_hold_out(rows, size, seed)
    return sorted(row.text for row in rows if rule(compute_row_digest(row)))


@pytest.mark.parametrize("size", [0.1, 0.5, 0.9])
def test_share_is_probability_per_document(size):
    rows = make_rows([f"document {number}" for number in range(2000)])
    deviation = (2000 * size * (1 - size)) ** 0.5
    assert abs(len(held_out_texts(rows, size)) - 2000 * size) < 4 * deviation


def test_share_needs_no_preliminary_pass():
    assert callable(build_hold_out(iter(lambda: pytest.fail("read"), None), 0.1, seed=0))


def test_number_holds_out_exactly_that_many_and_a_larger_one_a_superset():
    held_out = [held_out_texts(make_rows(), size) for size in (None, 1, 5, 9, 39)]
    assert list(map(len, held_out)) == [0, 1, 5, 9, 39]
    assert all(set(few) < set(more) for few, more in itertools.pairwise(held_out))


def test_copies_stay_together_and_count_once():
    rows = make_rows(random.Random(0).sample(TEXTS * 3, 3 * len(TEXTS)))
    assert held_out_texts(rows, 7) == sorted(held_out_texts(make_rows(), 7) * 3)
    assert held_out_texts(rows, 0.3) == sorted(held_out_texts(make_rows(), 0.3) * 3)


@pytest.mark.parametrize("size", [7, 0.3])
def test_held_out_depends_only_on_content_and_seed(size):
    shuffled = TEXTS.copy()
    random.Random(0).shuffle(shuffled)
    assert held_out_texts(make_rows(shuffled), size) == held_out_texts(make_rows(), size)
    assert held_out_texts(make_rows(), size, seed=1) != held_out_texts(make_rows(), size)


def test_chunk_marks_held_out_documents(tiny_tokenizer):
    rule = build_hold_out(make_rows(), 9, seed=3)
    (chunk,), _ = encode(make_rows(), tiny_tokenizer, rule)
    assert chunk.is_held_out.tolist() == [rule(compute_row_digest(row)) for row in make_rows()]
    taken = chunk.take(chunk.is_held_out)
    ends = np.cumsum(chunk.lengths)
    expected = [chunk.input_ids[end - n : end].tolist() for end, n in zip(ends, chunk.lengths, strict=True)]
    chosen = np.flatnonzero(chunk.is_held_out)
    assert taken.input_ids.tolist() == [token for at in chosen for token in expected[at]]
    assert taken.lengths.tolist() == chunk.lengths[chosen].tolist()
    assert taken.digests.tolist() == chunk.digests[chosen].tolist()

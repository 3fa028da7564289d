"""Broken rows: reported together, or dropped up to a fraction without effect on the others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from recipes_lib.config.schema import TokensConfig
from recipes_lib.data.packed import encoding
from recipes_lib.data.packed import training_data as streaming
from recipes_lib.data.packed.prepared_set import prepare
from recipes_lib.data.packed.training_data import build_train_stream, load_training_data
from recipes_lib.data.pairs.preference_sets import prepare_pairs
from recipes_lib.data.sources import rows as rows_module
from recipes_lib.data.sources.rows import BrokenRows, Row, encode_valid
from recipes_lib.errors import DataError, Problem

QUESTION = {"role": "user", "content": "Which?"}
BROKEN_LINES = {
    "no JSON": "{",
    "no object": "3",
    "no layout": "{}",
    "repeated key": '{"messages": [], "messages": []}',
    "no messages": '{"messages": []}',
    "no answer": json.dumps({"messages": [QUESTION]}),
    "half a pair": json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "half a \ud800 pair"}]}),
    "an end inside": json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "a<|im_end|>b"}]}),
}


@pytest.fixture(params=[3, 500])
def small_chunks(request, monkeypatch):
    for module in (encoding, streaming):
        monkeypatch.setattr(module, "ROWS_PER_CHUNK", request.param)


def row_of(pack_rows):
    return {tuple(pack["input_ids"].tolist()): pack["row_ids"].tolist() for pack in pack_rows}


def write_broken(tmp_path, chats, places):
    """Write the chats with all broken lines inserted at these positions."""
    lines = [json.dumps(chat) for chat in chats]
    for place, line in zip(places, BROKEN_LINES.values(), strict=True):
        lines.insert(place, line)
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4, 5, 6, 7], [4, 9, 14, 20, 21, 30, 31, 45]])
def test_valid_rows_are_prepared_as_without_broken_ones(
    build_config, make_chats, write_rows, load_tokenizer, tmp_path, small_chunks, places
):
    path = write_broken(tmp_path, make_chats(40), places)
    keys = {"max_length": 128, "broken_rows": "drop", "max_broken_fraction": 0.2}
    prepared = prepare(build_config(dataset_name=str(path), **keys), load_tokenizer)
    alone = prepare(build_config(max_length=128), load_tokenizer)
    assert list(row_of(prepared.train)) == list(row_of(alone.train))
    row_ids = sorted(number for numbers in row_of(prepared.train).values() for number in numbers)
    assert row_ids == sorted(set(range(48)) - set(places)), "a row keeps its place"
    assert prepared.manifest["broken_rows"] == {"train": {"num_rows": 48, "num_broken": 8}}
    (finding,) = [found for found in prepared.manifest["findings"] if "broken" in found["found"]]
    assert finding["severity"] == "warning"
    assert f"8 of 48 rows (16.67%) are broken and left out; the first is {path}:{places[0] + 1}: " in finding["found"]
    assert alone.manifest["broken_rows"] == {"train": {"num_rows": 40, "num_broken": 0}}
    with pytest.raises(DataError) as caught:
        prepare(build_config(dataset_name=str(path), **keys | {"max_broken_fraction": 0.16}), load_tokenizer)
    first, *kinds = caught.value.problems
    assert "8 of 48 rows (16.67%) are broken, and max_broken_fraction is 0.16" in first.found
    assert len(kinds) == 8


def test_every_kind_of_broken_row_is_reported(build_config, make_chats, load_tokenizer, tmp_path, small_chunks):
    places = [4, 9, 14, 20, 21, 30, 31, 45]
    config = build_config(dataset_name=str(write_broken(tmp_path, make_chats(40), places)))
    with pytest.raises(DataError) as caught:
        prepare(config, load_tokenizer)
    lines = {int(problem.where.rpartition(":")[2]) for problem in caught.value.problems}
    unreadable = {place + 1 for place in places[:6]}
    assert unreadable <= lines <= {place + 1 for place in places}


def test_broken_row_of_repeated_source_counts_once(build_config, make_chats, load_tokenizer, tmp_path):
    path = write_broken(tmp_path, make_chats(40), [4, 9, 14, 20, 21, 30, 31, 45])
    entry = {"name": str(path), "repeat": 2}
    config = build_config(dataset_mixture=[entry], broken_rows="drop", max_broken_fraction=0.2)
    manifest = prepare(config, load_tokenizer).manifest
    assert manifest["train"]["num_rows"] == 80
    assert manifest["train"]["num_duplicates"] == 40


def test_broken_held_out_rows_are_counted_separately(build_config, make_chats, load_tokenizer, tmp_path):
    path = write_broken(tmp_path, make_chats(40, start=100), range(8))
    keys = {"dataset_test_split": str(path), "broken_rows": "drop"}
    prepared = prepare(build_config(**keys, max_broken_fraction=0.2), load_tokenizer)
    assert prepared.manifest["broken_rows"] == {
        "train": {"num_rows": 40, "num_broken": 0},
        "eval": {"num_rows": 48, "num_broken": 8},
    }
    with pytest.raises(DataError, match="8 of 48 rows"):
        prepare(build_config(**keys, max_broken_fraction=0.1), load_tokenizer)


def test_broken_pairs_are_dropped_and_overlong_not_broken(build_config, write_rows, load_tokenizer, small_chunks):
    pairs = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {3 * n}"} for n in range(1, 31)]
    long = {"prompt": "Count:", "chosen": " 1" * 300, "rejected": " 2"}
    same, unpaired, half = {**pairs[0], "rejected": " 2"}, {"chosen": "a"}, {**pairs[0], "chosen": "half \ud800"}
    path = write_rows(rows=[*pairs[:9], same, *pairs[9:20], unpaired, half, long, *pairs[20:]])
    keys = {"dataset_name": str(path), "broken_rows": "drop", "max_broken_fraction": 0.1}
    prepared = prepare_pairs(build_config(**keys, max_length=64, overlong="drop"), load_tokenizer)
    assert prepared.manifest["broken_rows"] == {"train": {"num_rows": 34, "num_broken": 3}}
    assert prepared.manifest["dropped"]["train"]["num_overlong"] == 1
    alone = prepare_pairs(build_config(dataset_name=str(write_rows("alone.jsonl", pairs))), load_tokenizer)
    for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert [ids.tolist() for ids in prepared.train[column]] == [ids.tolist() for ids in alone.train[column]]
    with pytest.raises(DataError, match="tokens, max_length is") as caught:
        prepare_pairs(build_config(**keys, max_length=64), load_tokenizer)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:24"]


def test_stream_drops_broken_rows_up_to_limit(build_config, make_chats, tiny_tokenizer, tmp_path, small_chunks):
    places = [4, 9, 14, 20, 21, 30, 31, 45]
    path = write_broken(tmp_path, make_chats(40), places)
    keys = {"dataset_name": str(path), "dataset_streaming": True, "max_length": 128, "broken_rows": "drop"}

    def read(**options):
        return list(build_train_stream(build_config(**keys, **options), tiny_tokenizer, range(1)))

    packs = read(max_broken_fraction=0.2)
    assert row_of(packs) == row_of(read(max_broken_fraction=0.2)), "every process reads the same"
    assert sorted(np.concatenate([pack["row_ids"] for pack in packs])) == sorted(set(range(48)) - set(places))
    with pytest.raises(DataError, match="8 of 48 rows"):
        read(max_broken_fraction=0.1)
    keys |= {"dataset_test_split": str(path), "allow_eval_overlap": True}
    held_out = build_config(**keys, max_broken_fraction=1)
    eval_ids = np.concatenate(load_training_data(held_out, tiny_tokenizer).eval["row_ids"])
    assert sorted(eval_ids) == sorted(set(range(48)) - set(places))
    if encoding.ROWS_PER_CHUNK == 500:
        found = load_training_data(build_config(**keys, max_broken_fraction=0.2), tiny_tokenizer).findings
        assert any("8 of 48 rows" in finding.found for finding in found)


def test_no_row_left_is_error_at_every_limit(build_config, load_tokenizer, tiny_tokenizer, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"messages": []}\n' * 3)
    keys = {"dataset_name": str(path), "max_length": 128, "broken_rows": "drop", "max_broken_fraction": 1}
    with pytest.raises(DataError, match=r"3 of 3 rows \(100\.00%\) are broken"):
        prepare(build_config(**keys), load_tokenizer)
    with pytest.raises(DataError, match=r"3 of 3 rows \(100\.00%\) are broken"):
        load_training_data(build_config(**keys, dataset_streaming=True), tiny_tokenizer)


def endless():
    while True:
        yield Problem("stream row 0", "broken")


def test_endless_stream_of_broken_rows_stops(monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_ROWS", 50)
    for tokens in (TokensConfig(), TokensConfig(broken_rows="drop")):
        broken = BrokenRows(tokens, is_stream=True)
        assert list(broken.filter_valid(endless())) == []
        assert broken.num_rows == 1
        assert broken.list_problems("stream")


def test_rows_after_first_error_are_counted_not_encoded():
    rows = [Row(where=f"d row {number}", text="x") for number in range(4)]
    entries = [rows[0], Problem("d row 9", "broken"), rows[1], rows[2], Problem("d row 10", "broken"), rows[3]]
    refused, dropped = BrokenRows(), BrokenRows(TokensConfig(broken_rows="drop"))
    assert [entry.where for entry in refused.skip_after_error(entries)] == ["d row 0", "d row 9", "d row 10"]
    assert refused.num_rows == 3
    assert list(dropped.skip_after_error(entries)) == entries


def test_encode_valid_drops_only_failing_rows():
    rows = [Row(where=f"d row {number}", text="bad" if number % 3 else "good") for number in range(9)]

    def encode(chunk, row_ids):
        bad = [Problem(row.where, "bad") for row in chunk if row.text == "bad"]
        if bad:
            raise DataError(*bad)
        return list(row_ids)

    entries = [*rows, Problem("d row 9", "unreadable")]
    chunk, problems = encode_valid(encode, entries, 100, drop=True)
    assert chunk == [100, 103, 106]
    assert [problem.where for problem in problems] == [f"d row {number}" for number in (1, 2, 4, 5, 7, 8, 9)]
    chunk, problems = encode_valid(encode, entries, 100, drop=False)
    assert chunk is None
    assert len(problems) == 7


def test_valid_rows_are_encoded_together_and_only_named_ones_alone():
    rows = [Row(where=f"d row {number % 8}", text=str(number)) for number in range(10)]
    encoded = []

    def encode(chunk, row_ids):
        encoded.append(list(row_ids))
        for stage in ({"1"}, {"4", "6"}):  # As of pairs, whose answers are tokenised before they are compared.
            if bad := [Problem(row.where, "bad") for row in chunk if row.text in stage]:
                raise DataError(*bad)
        return list(row_ids)

    chunk, problems = encode_valid(encode, rows, 0, drop=True)
    # Row 9 has the name of row 1, and is valid.
    assert chunk == [0, 2, 3, 5, 7, 8, 9]
    assert [problem.where for problem in problems] == ["d row 1", "d row 4", "d row 6"]
    assert sorted(one for [one] in (ids for ids in encoded if len(ids) == 1)) == [1, 4, 6, 9]
    assert len([ids for ids in encoded if len(ids) > 1]) == 3


def test_chunk_that_fails_without_a_broken_row_is_an_error():
    def encode(chunk, row_ids):
        if len(chunk) > 1:
            raise DataError(Problem("d", "bad"))

    with pytest.raises(DataError, match="d: bad"):
        encode_valid(encode, [Row(where="d", text="a"), Row(where="d", text="b")], 0, drop=True)


@pytest.mark.parametrize(("num_rows", "is_named"), [(100, True), (99, False)])
def test_error_names_key_that_drops_so_few_broken_rows(num_rows, is_named):
    broken = BrokenRows(TokensConfig())
    broken.add(num_rows, [Problem("d row 10", "broken", "write another")])
    first, *rest = broken.list_problems("d")
    assert first.remedy == "write another"
    assert ["`broken_rows: drop`" in problem.remedy for problem in rest] == [True] * is_named


def test_broken_row_counts_resume():
    tokens = TokensConfig(broken_rows="drop", max_broken_fraction=0.1)
    broken = BrokenRows(tokens, num_rows=10, num_broken=1)
    assert broken.list_problems("d") == []
    broken.add(1, [Problem("d row 10", "broken")])
    (share, row) = broken.list_problems("d")
    assert "2 of 11 rows" in share.found
    assert row.where == "d row 10"
    assert broken.count() == {"num_rows": 11, "num_broken": 2}
    (share,) = BrokenRows(tokens, num_rows=11, num_broken=2).list_problems("d")
    assert "2 of 11 rows" in share.found

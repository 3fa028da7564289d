"""Held-out splits by content and seed, digests of rows, and detection of overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.sources import splits
from recipes_lib.data.sources.rows import Row
from recipes_lib.data.sources.splits import FindPlaces, compute_row_digest, refuse_overlap, split_rows
from recipes_lib.errors import DataError


def digest(value: int) -> bytes:
    return hashlib.sha256(str(value).encode()).digest()[:16]


def chat(question: str, answer: str, **fields: object) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Row(where="a row 0", messages=messages, **fields)  # type: ignore[arg-type]


def call(name: str, **arguments: int) -> Row:
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "4"}]
    return Row(where="a row 0", messages=[turns[0], {**turns[1], "tool_call_id": name}])


@settings(max_examples=40)
@given(values=st.lists(st.integers(0, 30), min_size=2, max_size=80), size=st.integers(1, 40), seed=st.integers(0, 9))
def test_split_is_partition_without_shared_content(values: list[int], size: int, seed: int) -> None:
    digests = [digest(value) for value in values]
    try:
        sides = split_rows(digests, size, seed)
    except DataError:
        assert size >= len(values) or size < max(map(values.count, values))
        return
    assert sorted(np.concatenate(sides)) == list(range(len(values)))
    train, test = ({values[position] for position in side} for side in sides)
    assert not train & test
    assert 0 < len(sides[1]) <= size
    num_single = sum(values.count(value) == 1 for value in values)
    if len(sides[1]) < size:
        assert num_single < size


@pytest.mark.parametrize(("size", "expected"), [(0.1, 100), (1, 1), (1.0, 1), (250, 250), (0.333, 333)])
def test_num_held_out_is_exact_for_distinct_rows(size: float, expected: int) -> None:
    assert len(split_rows([digest(value) for value in range(1000)], size, 0)[1]) == expected


def test_distinct_values_are_sorted_instead_of_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    unique = np.unique

    def sort(values: Any, **flags: bool) -> Any:
        assert flags, "without a flag, numpy hashes, which takes many times as long and the memory of a table"
        return unique(values, **flags)

    monkeypatch.setattr(np, "unique", sort)
    assert splits.find_distinct(np.array([3, 1, 3, 2, 1])).tolist() == [1, 2, 3]
    assert splits.count_duplicates(np.array([b"a", b"b", b"a"], "S16")) == 1


def test_split_depends_on_content_and_seed_not_order() -> None:
    digests = [digest(value) for value in range(300)]
    order = np.random.default_rng(0).permutation(300)
    held_out = {digests[n] for n in split_rows(digests, 30, 1)[1]}
    assert {digests[order[n]] for n in split_rows([digests[n] for n in order], 30, 1)[1]} == held_out
    assert {digests[n] for n in split_rows(digests, 30, 2)[1]} != held_out
    grown = [*digests, *(digest(value) for value in range(300, 330))]
    assert len({grown[n] for n in split_rows(grown, 33, 1)[1]} & held_out) >= 25


@pytest.mark.parametrize("size", [10, 11, 0.99, 0.01])
def test_empty_side_of_split_is_error(size: float) -> None:
    with pytest.raises(DataError, match="both sides"):
        split_rows([digest(value) for value in range(10)], size, 0)


def test_split_of_equal_rows_is_error() -> None:
    with pytest.raises(DataError, match="rows that are equal or have one prompt stay together"):
        split_rows([digest(0)] * 10, 3, 0)


SAME: dict[str, Callable[[], tuple[Row, Row]]] = {
    "place": lambda: (Row(where="a row 1", text="x"), Row(where="b:2", text="x")),
    "space around": lambda: (chat("Hi", "Hello"), chat(" Hi\n", "Hello ")),
    "key order": lambda: (
        Row(where="a row 0", messages=[{"role": "user", "content": "é"}]),
        Row(where="a row 0", messages=[{"content": "é", "role": "user"}]),
    ),
    "prompt length": lambda: (chat("Hi", "Hello"), chat("Hi", "Hello", num_prompt_messages=1)),
    "time and number of a turn": lambda: (
        chat("Hi", "Hello"),
        Row(
            where="a row 0",
            messages=[
                {"role": "user", "content": "Hi", "timestamp": "2023-04-09", "turn_identifier": 1},
                {"role": "assistant", "content": "Hello", "header": {"accept-language": "en"}},
            ],
        ),
    ),
    "identifier of a call": lambda: (call("call_1"), call("call_2")),
    "template variables": lambda: (chat("Hi", "Hello"), chat("Hi", "Hello", template_kwargs={"enable_thinking": True})),
}
DIFFERENT: dict[str, Callable[[], tuple[Row, Row]]] = {
    "space inside": lambda: (chat("a b", "c"), chat("a  b", "c")),
    "word": lambda: (chat("a", "b"), chat("a", "c")),
    "role": lambda: (chat("a", "b"), Row(where="a row 0", messages=[{"role": "assistant", "content": "a"}] * 2)),
    "boundary": lambda: (
        Row(where="a row 0", prompt="ab", completion="c"),
        Row(where="a row 0", prompt="a", completion="bc"),
    ),
    "field": lambda: (Row(where="a row 0", text="a"), Row(where="a row 0", completion="a")),
    "reasoning": lambda: (
        Row(where="a row 0", messages=[{"role": "assistant", "content": "a", "reasoning_content": "b"}]),
        Row(where="a row 0", messages=[{"role": "assistant", "content": "a", "reasoning_content": "c"}]),
    ),
    "arguments of a call": lambda: (call("1"), call("1", a=3)),
    "tools": lambda: (chat("a", "b"), chat("a", "b", tools=[{"name": "f"}])),
    "rejected": lambda: (chat("a", "b", rejected="c"), chat("a", "b", rejected="d")),
}


@pytest.mark.parametrize("kind", SAME)
def test_equal_content_has_equal_digest(kind: str) -> None:
    first, second = SAME[kind]()
    assert compute_row_digest(first) == compute_row_digest(second)
    assert len(compute_row_digest(first)) == 16


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_content_has_different_digest(kind: str) -> None:
    first, second = DIFFERENT[kind]()
    assert compute_row_digest(first) != compute_row_digest(second)


def test_digest_of_unwritable_row_names_it() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for extra in ({"tools": deep}, {"name": "\ud83d"}):
        row = Row(messages=[{"role": "user", "content": "a", **extra}], where="d.jsonl:7")
        with pytest.raises(DataError, match=r"d\.jsonl:7: the row cannot be written as JSON: "):
            compute_row_digest(row)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_overlap_is_counted_and_first_pairs_named(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_ROWS_AT_ONCE", rows_at_once)

    def name(side: str) -> FindPlaces:
        return lambda positions: {at: f"{side}{at}" for at in positions}

    train = [digest(value) for value in (5, 1, 2, 1, 3, 1, 3, 1)]
    held_out = [digest(value) for value in (9, 3, 1, 1)]
    # Documents have digests of 64 bits.
    halves = [np.frombuffer(b"".join(one[:8] for one in side), np.uint64) for side in (train, held_out)]
    pairs = r"t1 = e2, t3 = e2, t4 = e1, t5 = e2, t6 = e1, \.\.\.\n"
    for digests in ((train, held_out), halves):
        with pytest.raises(DataError, match=rf"^t1: 6 training rows are held-out rows too: {pairs}"):
            refuse_overlap(*digests, name("t"), name("e"))
    with pytest.raises(DataError, match=r"1 training rows share it: t0 = e0\n"):
        refuse_overlap(train[:1], train[:1], name("t"), name("e"), "share it")
    refuse_overlap(train, [digest(7)], name("t"), name("e"))

"""Dataset mixtures: repeats, weights by rows and by tokens, held-out data, and budgets of streams."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rows import write_rows

from recipes_lib.config.schema import DataConfig, TokensConfig
from recipes_lib.data.sources.local_files import FileSource
from recipes_lib.data.sources.mixtures import (
    Mixture,
    build_mixture,
    compute_budgets,
    compute_weights,
    list_entries,
    load_test_data,
    load_train_data,
)
from recipes_lib.data.sources.rows import Entry
from recipes_lib.data.tokens.dataset import RowOrder
from recipes_lib.errors import ConfigError, DataError, Problem

NUM_ROWS = 40
ROUNDED = [(0.24, 10), (0.26, 10), (1.07, 43), (1.08, 43)]
"""Repeats of 9.6, 10.4, 42.8 and 43.2 rows, which are rounded to the nearest number."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    names = []
    for name in "ab":
        path = tmp_path / f"{name}.jsonl"
        write_rows(path, ({"text": f"{name} {n}"} for n in range(NUM_ROWS)))
        names.append(str(path))
    return names[0], names[1]


def texts(mixture: Mixture) -> list[str]:
    return [str(row.text) for row in mixture.rows()]


@pytest.mark.parametrize(
    ("repeat", "expected"), [(0.25, 10), (1, 40), (1.0, 40), (2, 80), (2.5, 100), (0.1, 4), *ROUNDED]
)
def test_repeat_is_number_of_passes(repeat: float, expected: int, files: tuple[str, str]) -> None:
    counts = Counter(texts(build_mixture([{"name": files[0], "repeat": repeat}])))
    assert counts.total() == expected
    assert set(counts.values()) <= {int(repeat), int(repeat) + 1} - {0}
    assert len(counts) == min(NUM_ROWS, expected)


@pytest.mark.parametrize("others", [0, 1])
def test_repeat_that_draws_no_row_is_error(others: int, files: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=r"its repeat, 0\.01, draws none of its 40 rows") as caught:
        texts(build_mixture([{"name": files[0], "repeat": 0.01}, {"name": files[1]}][: 1 + others]))
    assert [problem.where for problem in caught.value.problems] == [files[0]]
    assert len(texts(build_mixture([{"name": files[0], "repeat": 1.01}]))) == NUM_ROWS


def test_weight_that_draws_no_row_is_error(files: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=r"its weight, 0\.001, draws none of its 40 rows"):
        texts(build_mixture([{"name": files[0], "weight": 1}, {"name": files[1], "weight": 0.001}]))


@pytest.mark.parametrize("amount", [{"weight": 1}, {"repeat": 0.5}])
def test_empty_source_is_the_only_error(amount: dict[str, float], files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    names = files[0], str(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="no rows: it is empty") as caught:
        texts(build_mixture([{"name": name, **amount} for name in names]))
    assert [problem.where for problem in caught.value.problems] == [names[1]]


@pytest.mark.parametrize("scale", [1, 100, 0.3])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [((0.8, 0.2), (40, 10)), ((0.2, 0.8), (10, 40)), ((0.5, 0.5), (40, 40)), ((0.7, 0.3), (40, 17))],
)
def test_weights_are_row_shares_without_repetition(weights, expected, scale, files) -> None:
    parts = [{"name": name, "weight": scale * weight} for name, weight in zip(files, weights, strict=True)]
    counts = Counter(texts(build_mixture(parts)))
    assert set(counts.values()) == {1}
    assert tuple(sum(text.startswith(part) for text in counts) for part in "ab") == expected


def test_weights_are_exact_for_unequal_sizes(tmp_path: Path) -> None:
    parts = []
    for name, num_rows, weight in (("a", 807, 80), ("b", 9000, 20)):
        path = tmp_path / f"{name}.jsonl"
        write_rows(path, ({"text": f"{name} {n}"} for n in range(num_rows)))
        parts.append({"name": str(path), "weight": weight})
    assert Counter(text[0] for text in texts(build_mixture(parts))) == {"a": 807, "b": 202}


def test_parts_are_concatenated_in_order(files: tuple[str, str]) -> None:
    found = texts(build_mixture([{"name": files[1], "repeat": 0.5}, {"name": files[0]}]))
    numbers = [int(text.split()[1]) for text in found]
    assert [text[0] for text in found] == ["b"] * 20 + ["a"] * 40
    assert numbers[:20] == sorted(numbers[:20])
    assert numbers[20:] == list(range(40))


def test_drawn_rows_depend_only_on_seed_and_part(files: tuple[str, str]) -> None:
    half = {"name": files[0], "repeat": 0.5}
    alone = texts(build_mixture([half], seed=1))
    assert texts(build_mixture([half], seed=1)) == alone
    assert texts(build_mixture([{"name": files[1]}, half], seed=1))[NUM_ROWS:] == alone
    assert texts(build_mixture([half], seed=2)) != alone


def test_drawn_part_that_grows_while_read_keeps_its_draw(files, monkeypatch) -> None:
    mixture = build_mixture([{"name": files[0], "repeat": 0.5}])
    expected, draw = texts(mixture), Mixture._draw

    def draw_then_grow(self: Mixture, *of_part: Any) -> Sequence[bool]:
        drawn = draw(self, *of_part)
        with Path(files[0]).open("a") as file:
            file.write('{"text": "later"}\n')
        return drawn

    monkeypatch.setattr(Mixture, "_draw", draw_then_grow)
    assert texts(mixture) == expected


def test_source_is_read_twice_at_most(files, monkeypatch) -> None:
    """To count its rows, and to yield them: parsing takes as long as tokenisation."""
    reads, rows = Counter[str](), FileSource.rows

    def count(self: FileSource) -> Iterator[Entry]:
        reads[self.name] += 1
        return rows(self)

    weighted = build_mixture([{"name": files[0], "weight": 0.2}, {"name": files[1], "weight": 0.8}])
    halved = build_mixture([{"name": files[0], "repeat": 0.5}, {"name": files[1]}])
    monkeypatch.setattr(FileSource, "rows", count)
    for mixture, expected in ((weighted, [2, 2]), (halved, [2, 1])):
        reads.clear()
        assert texts(mixture)
        assert [reads[name] for name in files] == expected


def test_broken_row_of_repeated_part_is_reported_once(files: tuple[str, str]) -> None:
    for name in files:
        with Path(name).open("a") as file:
            file.write('{"text": 3}\n')
    mixture = build_mixture([{"name": files[0], "repeat": 2.5}, {"name": files[1], "repeat": 0.5}])
    with pytest.raises(DataError) as caught:
        texts(mixture)
    places = [f"{name}:{NUM_ROWS + 1}" for name in files]
    assert [problem.where for problem in caught.value.problems] == places
    # Equal problems are merged in the error.
    assert [entry.where for entry in mixture.entries() if isinstance(entry, Problem)] == places
    dropped = TokensConfig(broken_rows="drop", max_broken_fraction=0.03)
    rows = Counter(str(row.text)[0] for row in mixture.rows(dropped))
    assert (rows["a"] in (99, 100), rows["b"] in (19, 20)) == (True, True), "a broken row may be among those drawn"


def test_fingerprint_changes_with_rows(files: tuple[str, str]) -> None:
    def fingerprint(*parts: dict[str, Any], seed: int = 0) -> str:
        return build_mixture(parts, seed=seed).fingerprint()

    first, second = {"name": files[0]}, {"name": files[1]}
    half = {**first, "repeat": 0.5}
    assert len({fingerprint(first, second), fingerprint(second, first), fingerprint(first), fingerprint(second)}) == 4
    assert fingerprint({**first, "repeat": 2}) != fingerprint(first)
    assert fingerprint({**first, "format": "text"}) != fingerprint(first)
    assert fingerprint(half, seed=1) != fingerprint(half, seed=2)
    weighted, other = ([{**first, "weight": share}, {**second, "weight": 1 - share}] for share in (0.5, 0.25))
    assert len({fingerprint(*weighted, seed=1), fingerprint(*weighted, seed=2), fingerprint(*other, seed=1)}) == 3
    assert fingerprint(first, seed=1) == fingerprint(first, seed=2)
    before = fingerprint(first)
    Path(files[0]).write_text('{"text": "other"}\n')
    assert fingerprint(first) != before


def test_missing_files_of_mixture_are_reported_together() -> None:
    with pytest.raises(DataError) as caught:
        build_mixture([{"name": "./no-such-a.jsonl"}, {"name": "./no-such-b.jsonl"}])
    assert len(caught.value.problems) == 2


def test_config_selects_training_and_held_out_data(files: tuple[str, str], tmp_path: Path) -> None:
    single = DataConfig(dataset_name=files[0], dataset_test_split=files[1])
    held_out = load_test_data(single)
    assert held_out is not None
    assert (len(texts(load_train_data(single))), texts(held_out)[0]) == (NUM_ROWS, "b 0")
    assert load_test_data(DataConfig(dataset_name=files[0])) is None
    mixed = DataConfig(dataset_mixture=[{"name": files[0]}, {"name": files[1], "repeat": 0.5}])
    assert len(texts(load_train_data(mixed))) == 60
    for name in files:
        Path(name).rename(tmp_path / {"a": "train.jsonl", "b": "test.jsonl"}[Path(name).stem])
    held_out = load_test_data(DataConfig(dataset_name=str(tmp_path), dataset_test_split="test"))
    assert held_out is not None
    assert texts(held_out)[0] == "b 0"


def test_dataset_columns_apply_to_all_or_one_entry(files: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "c.jsonl"
    other.write_text('{"content": "c 0"}\n')
    columns = {"text": "content"}
    single = DataConfig(dataset_name=str(other), dataset_test_split=str(other), dataset_columns=columns)
    held_out = load_test_data(single)
    assert held_out is not None
    assert texts(load_train_data(single)) == texts(held_out) == ["c 0"]
    for parts, default in (
        ([{"name": files[0]}, {"name": str(other), "columns": columns}], None),
        ([{"name": files[0], "columns": None}, {"name": str(other)}], columns),
    ):
        mixed = DataConfig(dataset_mixture=parts, dataset_columns=default)
        assert texts(load_train_data(mixed))[NUM_ROWS - 1 :] == [f"a {NUM_ROWS - 1}", "c 0"]


def test_missing_held_out_data_is_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no file or folder `b/c`"):
        load_test_data(DataConfig(dataset_name="a", dataset_test_split="b/c"))
    (tmp_path / "test").mkdir()
    with pytest.raises(ConfigError, match=r"a held-out path \(\./test\), or set `test_split_size`"):
        load_test_data(DataConfig(dataset_mixture=[{"name": "a"}], dataset_test_split="test"))


def test_bare_word_is_split_even_if_folder_exists(tmp_path, files, monkeypatch) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "1.jsonl").write_text(json.dumps({"text": f"the split {split}"}))
    monkeypatch.chdir(tmp_path)
    held_out = {}
    for state in ("nothing there", "an empty folder", "a folder of data"):
        if state == "an empty folder":
            Path("test").mkdir()
        elif state == "a folder of data":
            Path("test", "1.jsonl").write_text('{"text": "the folder"}')
        mixture = load_test_data(DataConfig(dataset_name="data", dataset_test_split="test"))
        assert mixture is not None
        held_out[state] = texts(mixture)
    assert all(found == ["the split test"] for found in held_out.values()), held_out
    for path in ("./test", "test/", str(tmp_path / "test"), "test/1.jsonl"):
        mixture = load_test_data(DataConfig(dataset_name="data", dataset_test_split=path))
        assert mixture is not None
        assert texts(mixture) == ["the folder"]
    with pytest.raises(DataError, match=r"a path \(\./test\)"):
        load_test_data(DataConfig(dataset_name=files[0], dataset_test_split="test"))


@pytest.fixture
def mix(build_config):
    """Build a configuration over a streamed mixture with these weights; ``None`` omits the weight."""

    def build(*weights, **options):
        entries = [{"name": f"{at}.jsonl"} | ({} if w is None else {"weight": w}) for at, w in enumerate(weights)]
        return build_config(dataset_mixture=entries, max_length=10, dataset_streaming=True, **options)

    return build


@pytest.mark.parametrize(
    ("weights", "num_tokens", "expected"),
    [
        ((None, None, None), (10, 30, 60), (0.1, 0.3, 0.6)),
        ((1.0, 1.0, 2.0), (10, 30, 60), (0.25, 0.25, 0.5)),
        ((3.0, None), (10, 30), (0.75, 0.25)),
        ((5.0,), (10,), (1.0,)),
        ((None,), (10,), (1.0,)),
    ],
)
def test_token_weights_default_to_size(mix, weights, num_tokens, expected):
    assert compute_weights(mix(*weights), num_tokens) == pytest.approx(expected)


def test_repeat_scales_default_token_weight(build_config):
    entries = [{"name": "a"}, {"name": "b", "repeat": 2}, {"name": "c", "repeat": 0.5}]
    weights = compute_weights(build_config(dataset_mixture=entries), (10, 30, 60))
    assert weights == pytest.approx((0.1, 0.6, 0.3))


def test_single_dataset_is_one_entry(build_config):
    config = build_config(dataset_name="a/b", dataset_config="c", dataset_revision="d", dataset_train_split="e")
    entry = {"name": "a/b", "config": "c", "revision": "d", "split": "e", "columns": None}
    assert list_entries(config.data) == [entry]
    assert compute_weights(config, [7]) == [1]


def draw(phases, num_tokens, max_length, num_sources) -> list[int]:
    """Return the number of tokens that a run of full rows reads from each source."""
    rows = [(-(-start // max_length), weights) for start, weights in phases if start < num_tokens]
    order = RowOrder([10**6] * num_sources, rows, seed=0)
    return (order.count_rows(-(-num_tokens // max_length)) * max_length).tolist()


@pytest.mark.parametrize("num_tokens", [10, 1000, 12_340])
@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.2, 0.1), (1.0, 1.0), (2.0, None, 0.5)])
def test_stream_budget_covers_drawn_tokens_within_one_window(mix, weights, num_tokens):
    budgets = compute_budgets(mix(*weights), num_tokens)
    drawn = draw([(0, [1.0 if w is None else w for w in weights])], num_tokens, 10, len(weights))
    total = sum(1.0 if w is None else w for w in weights)
    for budget, tokens, weight in zip(budgets, drawn, weights, strict=True):
        assert tokens <= budget
        assert budget <= num_tokens * (1.0 if weight is None else weight) / total + 10 + 1


@pytest.mark.parametrize("num_tokens", [100, 1000, 5000])
def test_stream_budget_covers_curriculum_phases(mix, num_tokens):
    phases = [(0, [1.0, 0.0, 3.0]), (305, [0.0, 1.0, 1.0]), (2000, [2.0, 5.0, 0.0])]
    curriculum = [{"start_tokens": start, "weights": weights} for start, weights in phases]
    budgets = compute_budgets(mix(None, None, None, dataset_curriculum=curriculum), num_tokens)
    drawn = draw(phases, num_tokens, 10, 3)
    assert all(tokens <= budget <= tokens + 100 for tokens, budget in zip(drawn, budgets, strict=True))


def test_unknown_stream_length_problems_are_raised_together(mix):
    with pytest.raises(ConfigError) as raised:
        compute_budgets(mix(None, None, test_split_size=5), None)
    assert [problem.where for problem in raised.value.problems] == [
        "test_split_size",
        "dataset_streaming",
        "dataset_streaming",
    ]
    assert all(problem.remedy for problem in raised.value.problems)


def test_stream_accepts_held_out_share(mix):
    assert compute_budgets(mix(1.0, test_split_size=0.1), 1000) == [1010]
    assert np.sum(compute_budgets(mix(1.0, 1.0), 1000)) == 1020

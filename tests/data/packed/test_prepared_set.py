"""Prepared sets of packs: content, waiting ranks, lengths, splits, overlap and refusals."""

from __future__ import annotations

import errno
import io
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from huggingface_hub import constants
from rich.console import Console

from recipes_lib.data import store
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed import prepared_set as module
from recipes_lib.data.packed.prepared_set import prepare, render_summary
from recipes_lib.data.prompts import prepare_prompts
from recipes_lib.data.sources.mixtures import load_train_data
from recipes_lib.data.store import find_root
from recipes_lib.errors import ConfigError, DataError


def documents(dataset) -> dict[int, list[tuple[list[int], list[bool]]]]:
    """Return the documents of a prepared split by row id."""
    found: dict[int, list[tuple[list[int], list[bool]]]] = {}
    for pack in dataset:
        ends = np.cumsum(pack["seq_lengths"])[:-1]
        ids, masks = np.split(pack["input_ids"], ends), np.split(pack["loss_mask"], ends)
        for row_id, tokens, mask in zip(pack["row_ids"], ids, masks, strict=True):
            found.setdefault(int(row_id), []).append((tokens.tolist(), mask.tolist()))
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("tokens_at_once", [1, 1000, 1 << 22])
def test_prepared_set_equals_encoder_output(
    build_config, load_tokenizer, tiny_tokenizer, monkeypatch, packing, tokens_at_once
):
    monkeypatch.setattr("recipes_lib.data.packed.packing._TOKENS_AT_ONCE", tokens_at_once)
    config = build_config(packing=packing)
    prepared = prepare(config, load_tokenizer)
    expected = RowEncoder(tiny_tokenizer).encode(list(load_train_data(config.data).rows()))
    assert documents(prepared.train) == {
        row_id: [(row.input_ids.tolist(), row.loss_mask.tolist())] for row_id, row in enumerate(expected)
    }
    assert prepared.eval is None
    capacity = prepared.manifest["max_length"]
    assert all(len(pack["input_ids"]) <= capacity for pack in prepared.train)
    assert len(prepared.train) < 40 if packing else len(prepared.train) == 40


def test_record_batch_of_long_rows_has_few_of_them():
    """A batch is held in memory, and its offsets are 32-bit: a thousand rows of 4 M tokens would overflow them."""
    batches = module.read_batches(np.full(6, 3 << 20), lambda rows: pa.record_batch({"row": np.arange(6)[rows]}))
    found = [batch["row"].to_pylist() for batch in batches]
    assert max(map(len, found)) <= 2
    assert [row for batch in found for row in batch] == list(range(6))


@pytest.fixture
def clock(monkeypatch):
    """A file system without locks, and a clock that advances by 100 s per poll for a set."""

    class Clock:
        seconds = 0.0

        def monotonic(self):
            return self.seconds

        def sleep(self, _):
            self.seconds += 100

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(store, "_BEAT_SECONDS", 0.001)
    monkeypatch.setattr(store, "time", Clock())
    return store.time


def test_other_ranks_wait_for_heartbeat_without_locks(build_config, load_tokenizer, monkeypatch, clock):
    """The first rank tokenises for 20 minutes without writing a file."""
    config, (root, key, *_), pause = build_config(), module.identify_set(build_config()), threading.Event()

    def sleep(seconds, pass_time=clock.sleep):
        pass_time(seconds)
        if clock.seconds == 1200:
            prepare(config, load_tokenizer)
            return
        with store.hold_lock(root, key):
            begun = store.read_beat(root, key)
            assert any(store.read_beat(root, key) != begun or pause.wait(0.001) for _ in range(10_000))

    monkeypatch.setattr(clock, "sleep", sleep)
    assert prepare(config, None, local_rank=1).key == key
    assert clock.seconds == 1200


def test_dead_first_process_is_detected_without_locks(build_config, clock):
    root, key, *_ = module.identify_set(build_config())
    with store.hold_lock(root, key):
        pass
    with pytest.raises(DataError, match=r"first process .* no heartbeat for 120 s .*the file system has no locks"):
        prepare(build_config(), None, local_rank=3)


def test_max_length_defaults_to_longest_row_of_both_splits(build_config, load_tokenizer, write_rows, make_chats):
    held_out = make_chats(3, start=100)
    held_out[1]["messages"][1]["content"] = "word " * 70
    path = write_rows("held_out.jsonl", held_out)
    prepared = prepare(build_config(dataset_test_split=str(path)), load_tokenizer)
    longest = max(len(tokens) for rows in documents(prepared.eval).values() for tokens, _ in rows)
    assert prepared.manifest["max_length_is_derived"]
    assert prepared.manifest["max_length"] % 64 == 0
    assert prepared.manifest["max_length"] - 64 < longest <= prepared.manifest["max_length"]
    assert prepared.manifest["eval"]["length_max"] == longest


def test_configured_max_length_is_kept(build_config, load_tokenizer):
    prepared = prepare(build_config(max_length=100), load_tokenizer)
    assert (prepared.manifest["max_length"], prepared.manifest["max_length_is_derived"]) == (100, False)


def test_overlong_rows_are_one_problem_with_count(build_config, load_tokenizer):
    config = build_config(max_length=30)
    lengths = [len(row.input_ids) for row in RowEncoder(load_tokenizer()).encode(list(rows_of(config)))]
    with pytest.raises(DataError) as raised:
        prepare(config, load_tokenizer)
    expected = [(line, length) for line, length in enumerate(lengths, start=1) if length > 30]
    (problem,) = raised.value.problems
    (first, length), worst = expected[0], max(expected, key=lambda row: row[1])
    assert (problem.where, problem.size) == (f"{config.data.dataset_name}:{first}", length)
    assert problem.found.startswith(
        f"{length} tokens, max_length is 30; so in {len(expected)} of 40 rows ({len(expected) / 40:.1%}), next "
    )
    assert problem.found.endswith(
        f"the worst is {config.data.dataset_name}:{worst[0]}: {worst[1]} tokens, max_length is 30"
    )


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_very_long_row_is_cut_before_tokenisation(build_config, write_rows, make_chats, load_tokenizer, overlong):
    rows = make_chats(3)
    rows[1]["messages"][1]["content"] = "flour and snow " * 10_000
    options = {"dataset_name": str(write_rows(rows=rows)), "max_length": 64}
    prepared = prepare(build_config(**options, overlong=overlong), load_tokenizer)
    # With a limit of lost targets, every token is counted.
    whole = prepare(build_config(**options, overlong=overlong, max_truncated_fraction=1.0), load_tokenizer)
    assert documents(prepared.train) == documents(whole.train)
    assert 64 < prepared.manifest["train"]["length_max"] < whole.manifest["train"]["length_max"] / 10
    assert any("only their beginning" in finding["found"] for finding in prepared.manifest["findings"])
    assert prepared.manifest["train"]["stop_fraction"] == whole.manifest["train"]["stop_fraction"] == 1
    pieces = prepare(build_config(**options, overlong="split"), load_tokenizer)
    assert pieces.manifest["train"]["length_max"] == whole.manifest["train"]["length_max"], "no piece is lost"
    with pytest.raises(DataError, match=r"jsonl:2: a text of 150,\d+ characters, which is more than max_length tokens"):
        prepare(build_config(**options), load_tokenizer)


def rows_of(config):
    return load_train_data(config.data).rows()


def test_truncation_above_limit_is_refused(build_config, load_tokenizer):
    with pytest.raises(DataError, match=r"max_truncated_fraction is 0\.01"):
        prepare(build_config(max_length=45, overlong="truncate", max_truncated_fraction=0.01), load_tokenizer)
    prepared = prepare(build_config(max_length=45, overlong="truncate"), load_tokenizer)
    assert [finding["severity"] for finding in prepared.manifest["findings"]] == ["warning", "ok", "ok", "ok"]
    assert "rows longer than max_length" in prepared.manifest["findings"][0]["found"]
    cut = prepared.manifest["train"]["cut"]
    kept = sum(sum(mask[1:]) for rows in documents(prepared.train).values() for _, mask in rows)
    assert cut["num_targets"] - cut["num_lost_targets"] == kept == prepared.manifest["train"]["num_target_tokens"]
    assert cut["num_overlong"] > 0
    assert all(len(tokens) <= 45 for rows in documents(prepared.train).values() for tokens, _ in rows)


def test_held_out_rows_are_disjoint_and_seeded(build_config, load_tokenizer):
    sides = []
    for seed in (1, 1, 2):
        prepared = prepare(build_config(test_split_size=8, seed=seed), load_tokenizer)
        sides.append((sorted(documents(prepared.train)), sorted(documents(prepared.eval))))
    for train, held_out in sides:
        assert len(held_out) == 8
        assert sorted(train + held_out) == list(range(40))
    assert sides[0] == sides[1] != sides[2]


def test_unused_seed_keeps_key(build_config, load_tokenizer):
    first, second = (prepare(build_config(seed=seed), load_tokenizer) for seed in (1, 2))
    assert first.path == second.path


def test_overlap_is_refused_unless_allowed(build_config, load_tokenizer, write_rows, make_chats):
    path = write_rows("held_out.jsonl", make_chats(2, start=39))
    with pytest.raises(DataError, match="1 training rows are held-out rows too") as raised:
        prepare(build_config(dataset_test_split=str(path)), load_tokenizer)
    assert "train.jsonl:40" in str(raised.value)
    assert "held_out.jsonl:1" in str(raised.value)
    prepared = prepare(build_config(dataset_test_split=str(path), allow_eval_overlap=True), load_tokenizer)
    assert prepared.manifest["eval"]["num_rows"] == 2


def test_broken_rows_of_both_splits_are_raised_together(build_config, load_tokenizer, write_rows, make_chats):
    train, held_out = make_chats(5), make_chats(5, start=50)
    train[1]["messages"], held_out[3]["messages"] = [], []
    config = build_config(
        dataset_name=str(write_rows("a.jsonl", train)), dataset_test_split=str(write_rows("b.jsonl", held_out))
    )
    with pytest.raises(DataError) as raised:
        prepare(config, load_tokenizer)
    assert [Path(problem.where).name for problem in raised.value.problems] == ["a.jsonl:2", "b.jsonl:4"]


@pytest.mark.parametrize("make", [prepare, prepare_prompts])
@pytest.mark.parametrize("held_out", [False, True])
def test_data_changed_during_preparation_is_refused(
    build_config, write_rows, make_chats, load_tokenizer, held_out, make
):
    path = write_rows("changing.jsonl", make_chats(5, start=100))
    config = build_config(response_length=8, **{"dataset_test_split" if held_out else "dataset_name": str(path)})

    def change_then_load():
        write_rows("changing.jsonl", make_chats(6, start=200))
        return load_tokenizer()

    with pytest.raises(DataError, match=r"changing\.jsonl: the data changed while they were prepared"):
        make(config, change_then_load)
    assert not list(find_root(config).glob("*/COMPLETE.json"))
    assert make(config, load_tokenizer).is_new


def test_streamed_data_is_not_prepared(build_config, load_tokenizer):
    with pytest.raises(ConfigError, match="dataset_streaming"):
        prepare(build_config(dataset_streaming=True), load_tokenizer)


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_empty_prepared_set_is_refused(build_config, load_tokenizer, overlong):
    config = build_config(max_length=2, overlong=overlong, max_truncated_fraction=1.0, loss_on="last_assistant")
    if overlong == "split":
        config = build_config(max_length=1, overlong=overlong, max_truncated_fraction=1.0)
    with pytest.raises(DataError, match="no row is left"):
        prepare(config, load_tokenizer)


def test_prepared_dir_is_used(build_config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HOME", "~/hub")
    assert find_root(build_config(prepared_dir=None)) == tmp_path / "hub/recipes_lib/prepared"
    assert find_root(build_config(prepared_dir="~/sets")) == tmp_path / "sets"
    assert find_root(build_config(prepared_dir="~cachedir/x")) == Path("~cachedir/x")


def test_summary_has_figures_of_both_splits(build_config, load_tokenizer):
    prepared = prepare(build_config(test_split_size=5), load_tokenizer)
    out = io.StringIO()
    Console(file=out, width=160).print(render_summary(prepared))
    text = out.getvalue()
    for split in ("train", "eval"):
        audit = prepared.manifest[split]
        for figure in (audit["num_rows"], audit["num_packed_tokens"], audit["num_packs"]):
            assert f"{figure:,}" in text
    assert "derived" in text

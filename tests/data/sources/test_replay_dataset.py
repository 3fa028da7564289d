"""Replay of earlier data: the order, against a row-by-row reference, and the share by tokens or pairs."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.packed import prepared_set
from recipes_lib.data.packed.training_data import count_trained_tokens, load_training_data
from recipes_lib.data.pairs.preference_sets import load_pair_data
from recipes_lib.data.sources.replay_dataset import (
    EpochOrder,
    ReplayOrder,
    find_replay_warning,
    find_replayed,
    read_order_seed,
)
from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.errors import ConfigError, DataError

SHARES = (0.01, 0.05, 0.1, 0.25, 1 / 3, 0.5, 0.9)


def draw_by_deficit(terms, replayed_terms, share, num_rows, seed):
    """Choose rows one by one: a replayed row while their share is below the target, otherwise a new one."""
    streams = EpochOrder(len(terms), seed), EpochOrder(len(replayed_terms), None if seed is None else seed ^ 0x5EED)
    share = Fraction(str(share)).limit_denominator(1_000_000)
    taken, sums, rows = [0, 0], [0, 0], []
    for _ in range(num_rows):
        is_replayed = int(sums[1] < share * sum(sums))
        (row,) = streams[is_replayed].locate(np.array([taken[is_replayed]])).tolist()
        taken[is_replayed] += 1
        sums[is_replayed] += int((terms, replayed_terms)[is_replayed][row])
        rows.append(row + is_replayed * len(terms))
    return rows


@settings(max_examples=40)
@given(
    terms=st.lists(st.integers(1, 90), min_size=1, max_size=30),
    replayed=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    share=st.sampled_from(SHARES),
    seed=st.sampled_from([None, 0, 7]),
)
def test_replay_order_equals_deficit_reference(terms, replayed, share, seed):
    terms, replayed = np.array(terms), np.array(replayed)
    order = ReplayOrder(terms, replayed, share, seed=seed)
    num_rows = 2 * order.rows_per_epoch + 5
    rows = order.locate(np.arange(num_rows))
    assert rows.tolist() == draw_by_deficit(terms, replayed, share, num_rows, seed)
    # In every prefix, the replayed tokens deviate from their share by at most one row.
    every = np.concatenate([terms, replayed])[rows]
    replayed_sums = np.cumsum(np.where(rows >= len(terms), every, 0))
    off = replayed_sums - share * np.cumsum(every)
    assert np.abs(off).max() <= max(terms.max(), replayed.max())
    # Any range has the rows that it has in the whole run.
    for first in (0, 1, num_rows // 2, num_rows - 3):
        assert order.locate(np.arange(first, num_rows)).tolist() == rows[first:].tolist()
    # An epoch has each new row once, in the order without replay.
    epoch = rows[: order.rows_per_epoch]
    assert epoch[epoch < len(terms)].tolist() == EpochOrder(len(terms), seed).locate(np.arange(len(terms))).tolist()


def test_replay_uses_every_row_before_repeating():
    order = ReplayOrder(np.full(40, 3), np.full(7, 5), 0.25, seed=1)
    rows = order.locate(np.arange(300))
    replayed, new = rows[rows >= 40], rows[rows < 40]
    assert all(len(set(replayed[at : at + 7])) == 7 for at in range(0, len(replayed) - 7, 7))
    assert all(len(set(new[at : at + 40])) == 40 for at in range(0, len(new) - 40, 40))
    assert replayed[:7].tolist() != replayed[7:14].tolist()


@pytest.fixture
def write_all(build_config, write_rows, make_chats, tmp_path):
    """Build a configuration over 40 chats; 25 others can be replayed."""
    write_rows("new.jsonl", make_chats(40))
    write_rows("old.jsonl", make_chats(25, start=100))

    def build(**options):
        return build_config(**{"dataset_name": str(tmp_path / "new.jsonl"), "max_length": 96} | options)

    return build


@pytest.mark.parametrize(("max_length", "expected"), [(None, 96), (32, 32)])
def test_given_maximum_length_replaces_that_of_the_run(max_length, expected, write_all, tmp_path):
    replayed = find_replayed(write_all(replay_dataset=str(tmp_path / "old.jsonl")), max_length)
    assert replayed.tokens.max_length == expected


@pytest.mark.parametrize(
    ("keys", "seed"),
    [
        ({"seed": 3}, 3),
        ({"seed": 3, "data_seed": 0}, 0),
        ({"seed": 3, "data_seed": 5, "train_sampling_strategy": "sequential"}, None),
    ],
)
def test_data_seed_orders_rows_unless_they_are_read_in_sequence(keys, seed, write_all):
    config = write_all()
    assert read_order_seed(dataclasses.replace(config, training={**config.training, **keys})) == seed


def test_replayed_rows_are_warned_of_above_four_passes_an_epoch():
    records = [{}, *({"replay": {"passes_per_epoch": passes}} for passes in (4.0, 4.25))]
    assert [len(find_replay_warning(record)) for record in records] == [0, 0, 1]
    assert "4.2 times an epoch" in find_replay_warning(records[-1])[0]


def test_replay_share_of_packs_counts_trained_tokens(write_all, tiny_tokenizer, tmp_path):
    plain = load_training_data(write_all(), tiny_tokenizer)
    keys = {"replay_dataset": str(tmp_path / "old.jsonl"), "replay_share": 0.2}
    data = load_training_data(write_all(**keys), tiny_tokenizer)
    assert plain.order is None
    assert data.train[: len(plain.train)]["input_ids"][-1].tolist() == plain.train[-1]["input_ids"].tolist()
    terms = count_trained_tokens(data.train)
    assert terms.tolist() == [int(row["loss_mask"].sum()) for row in data.train]
    rows = data.order.locate(np.arange(data.rows_per_epoch))
    is_replayed = rows >= len(plain.train)
    shares = np.cumsum(np.where(is_replayed, terms[rows], 0)) - 0.2 * np.cumsum(terms[rows])
    assert is_replayed.any()
    assert np.abs(shares).max() <= terms.max()
    text = "".join(tiny_tokenizer.decode(data.train[int(row)]["input_ids"]) for row in rows[is_replayed])
    assert "Question 10" in text
    assert "Question 3:" not in text
    assert data.record["replay"]["share"] == 0.2


def test_held_out_rows_of_earlier_run_are_not_replayed(write_all, tiny_tokenizer, tmp_path):
    earlier = write_all(dataset_name=str(tmp_path / "old.jsonl"), test_split_size=10, seed=3)
    held_out = load_training_data(earlier, tiny_tokenizer).eval
    run = tmp_path / "earlier"
    run.mkdir()
    keys = {"dataset_name": str(tmp_path / "old.jsonl"), "test_split_size": 10, "seed": 3, "loss_on": "all"}
    (run / "run.json").write_text(json.dumps({"config": keys}))
    config = write_all(replay_from=str(run))
    data = load_training_data(config, tiny_tokenizer)
    texts = tiny_tokenizer.decode(np.concatenate([row["input_ids"] for row in data.train]))
    documents = tiny_tokenizer.decode(np.concatenate([row["input_ids"] for row in held_out])).split("<|im_start|>user")
    assert len(documents) == 11
    assert not any(document in texts for document in documents[1:])
    assert data.record["replay"]["train"]["num_rows"] == 15
    assert find_replayed(config).tokens.loss_on == "all"


@pytest.mark.parametrize("is_named", [False, True])
def test_held_out_rows_are_not_replayed(write_all, write_rows, make_chats, tiny_tokenizer, tmp_path, is_named):
    earlier = write_rows("earlier.jsonl", make_chats(60))  # All rows of the new data are among them.
    keys = {"replay_dataset": str(earlier), "replay_share": 0.2, "test_split_size": 10}
    if is_named:
        other = write_rows("other.jsonl", make_chats(9, start=200))
        split = {"test_split_size": None, "dataset_test_split": str(tmp_path / "new.jsonl")}
        keys |= {"dataset_name": str(other), **split}
    with pytest.raises(DataError, match=rf"[14]0 training rows are held-out rows too: {earlier}:\d+ = .*new.jsonl:\d+"):
        load_training_data(write_all(**keys), tiny_tokenizer)
    assert load_training_data(write_all(**keys, allow_eval_overlap=True), tiny_tokenizer).order is not None


def test_rows_are_not_digested_without_rows_to_compare(write_all, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_set, "_digest_rows", lambda _: pytest.fail("takes minutes"))
    for keys in ({"test_split_size": 5}, {"replay_dataset": str(tmp_path / "old.jsonl"), "replay_share": 0.2}):
        assert len(load_training_data(write_all(**keys), tiny_tokenizer).train)


def test_replay_share_of_pairs_counts_pairs(build_config, write_rows, tiny_tokenizer, tmp_path):
    def write(name, start, **more):
        rows = [
            {"prompt": f"{n}?", "chosen": f" {n} a", "rejected": f" {n} b", **more} for n in range(start, start + 20)
        ]
        write_rows(name, rows)

    write("new.jsonl", 0)
    write("old.jsonl", 100, margin=0.5)
    keys = {"dataset_name": str(tmp_path / "new.jsonl"), "max_length": 64}
    config = build_config(**keys, replay_dataset=str(tmp_path / "old.jsonl"), replay_share=0.1, recipe="dpo")
    data = load_pair_data(config, tiny_tokenizer)
    plain = load_pair_data(build_config(**keys, recipe="dpo"), tiny_tokenizer)
    assert (len(data.train), data.rows_per_epoch, plain.rows_per_epoch) == (40, 23, 20)
    assert data.record["key"] != plain.record["key"]
    assert [row["margin"] for row in data.train] == [0] * 20 + [0.5] * 20
    rows = data.order.locate(np.arange(1000))
    assert np.abs(np.cumsum(rows >= 20) - 0.1 * np.arange(1, 1001)).max() <= 1


def test_replay_share_of_documents_counts_tokens(build_config, write_rows, tiny_tokenizer, tmp_path):
    for name in ("new", "old"):
        write_rows(f"{name}.jsonl", [{"text": f"Text {number} of the {name} baker"} for number in range(40)])
    keys = {"dataset_name": str(tmp_path / "new.jsonl"), "max_length": 16, "recipe": "pretrain"}
    config = build_config(**keys, replay_dataset=str(tmp_path / "old.jsonl"), replay_share=0.05)
    data = prepare_tokens(config, lambda: tiny_tokenizer)
    assert [source.name.rpartition("/")[2] for source in data.train] == ["new.jsonl", "old.jsonl"]
    assert list(data.weights) == [0.95, 0.05]
    assert data.num_replayed == 1
    again = {**keys, "replay_dataset": keys["dataset_name"], "replay_share": 0.05, "test_split_size": 5}
    with pytest.raises(DataError, match=r"5 training rows are held-out rows too: .*new\.jsonl:"):
        prepare_tokens(build_config(**again), lambda: tiny_tokenizer)
    assert prepare_tokens(build_config(**again, allow_eval_overlap=True), lambda: tiny_tokenizer).eval


@pytest.mark.parametrize(("size", "is_refused"), [(None, True), (0.2, True), (0.4, False)])
def test_documents_held_out_by_an_earlier_pretraining_run_are_not_trained_on(
    build_config, write_rows, tiny_tokenizer, tmp_path, size, is_refused
):
    write_rows("texts.jsonl", [{"text": f"Text {number} of the baker"} for number in range(40)])
    keys = {"dataset_name": str(tmp_path / "texts.jsonl"), "test_split_size": 0.4}
    (tmp_path / "run.json").write_text(json.dumps({"config": keys}))
    keys |= {"max_length": 16, "recipe": "pretrain", "replay_from": str(tmp_path), "test_split_size": size}
    if is_refused:
        with pytest.raises(DataError, match=r"\d+ training rows are held-out rows too"):
            prepare_tokens(build_config(**keys), lambda: tiny_tokenizer)
    data = prepare_tokens(build_config(**keys, allow_eval_overlap=is_refused), lambda: tiny_tokenizer)
    sides = [{digest for one in side for digest in one.digests.tolist()} for side in (data.train, data.eval.values())]
    assert bool(sides[0] & sides[1]) == is_refused


@pytest.mark.parametrize(
    ("record", "error", "words"),
    [
        (None, DataError, "cannot be read"),
        ({"config": {"dataset_name": 3}}, DataError, "`dataset_name` is a number"),
        ({"config": {}}, ConfigError, "names no dataset"),
    ],
)
def test_earlier_run_without_dataset_is_refused(write_all, tmp_path, record, error, words):
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(error, match=words):
        find_replayed(write_all(replay_from=str(tmp_path)))

"""Prepared preference sets: content, splits by prompt, overlap, dropped pairs and margins."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed import encoding, packing
from recipes_lib.data.packed.prepared_set import prepare
from recipes_lib.data.pairs import preference_sets
from recipes_lib.data.pairs.preference_sets import encode_pairs, identify_pairs, load_pair_data, prepare_pairs
from recipes_lib.data.sources.mixtures import load_train_data
from recipes_lib.errors import ConfigError, DataError

COLUMNS = ["prompt_ids", "chosen_ids", "rejected_ids", "row_id"]


@pytest.fixture
def build_pairs(build_config, write_rows):
    """Build a configuration of a run over pairs; by default 40 of them."""

    def build(rows=None, **options):
        path = write_rows("pairs.jsonl", make_pairs(40) if rows is None else rows)
        return build_config(**{"dataset_name": str(path)} | options)

    return build


def make_pairs(num_rows: int, start: int = 0, prompts: int = 1000, **more: Any) -> list[dict[str, Any]]:
    """Return pairs of different lengths; pairs whose numbers are equal modulo ``prompts`` share a prompt."""
    return [
        {
            "prompt": [{"role": "user", "content": f"Question {number % prompts}?"}],
            "chosen": [{"role": "assistant", "content": f"Answer {number}." + " yes" * (number % 9)}],
            "rejected": [{"role": "assistant", "content": f"Answer -{number}." + " yes" * (5 * number % 9)}],
            **more,
        }
        for number in range(start, start + num_rows)
    ]


def pairs_of(dataset) -> dict[int, list[list[int]]]:
    return {int(row["row_id"]): [row[name].tolist() for name in COLUMNS[:3]] for row in dataset}


def test_pair_remarks_report_content_lost_by_template(build_pairs, load_tokenizer):
    rows = make_pairs(40)
    rows[7]["rejected"][0]["reasoning_content"] = "because"
    prepared = prepare_pairs(build_pairs(rows), load_tokenizer)
    (finding,) = [found for found in prepared.manifest["findings"] if "reasoning" in found["found"]]
    assert finding["severity"] == "warning"
    assert finding["found"].startswith("train: 1 of 40 rows give reasoning in their last turn")
    assert finding["found"].endswith("pairs.jsonl:8")


def encode_alone(config, tokenizer) -> dict[int, list[list[int]]]:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset_format="preference"))
    rows = list(load_train_data(config.data).rows())
    return {
        number: [ids.tolist() for ids in encode_pairs(RowEncoder(tokenizer), [row])[0][:3]]
        for number, row in enumerate(rows)
    }


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 40])
def test_prepared_pairs_equal_encoder_output(build_pairs, load_tokenizer, tiny_tokenizer, monkeypatch, rows_per_chunk):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", rows_per_chunk)
    monkeypatch.setattr(packing, "_TOKENS_AT_ONCE", 50 * rows_per_chunk)
    config = build_pairs()
    prepared = prepare_pairs(config, load_tokenizer)
    assert prepared.train.column_names == COLUMNS
    assert {prepared.train.features[name].feature.dtype for name in COLUMNS[:3]} == {"uint32"}
    assert list(pairs_of(prepared.train)) == list(range(40))
    assert pairs_of(prepared.train) == encode_alone(config, tiny_tokenizer)
    assert prepared.eval is None
    assert prepared.manifest["train"]["num_pairs"] == 40


def test_memory_per_pair_is_at_most_80_bytes_for_any_length(build_pairs, load_tokenizer, monkeypatch):
    seen, drop = [], preference_sets.drop_pairs
    monkeypatch.setattr(preference_sets, "drop_pairs", lambda side, limit: (seen.append(side), drop(side, limit))[1])
    rows = make_pairs(40)
    for row in rows:
        row["rejected"][0]["content"] += " the baker opens" * 50
    prepare_pairs(build_pairs(rows), load_tokenizer)
    (side,) = seen
    held = [side.digests, *side.columns.values(), *side.examples.columns]
    assert isinstance(side.examples.tokens, encoding.TokenFile)
    assert sum(array.nbytes for array in held) <= 80 * len(rows)
    assert side.examples.lengths.min() > 80


def test_pairs_and_packs_have_different_keys(build_pairs, load_tokenizer):
    config = build_pairs(dataset_format="preference")
    pairs, packs = prepare_pairs(config, load_tokenizer), prepare(config, load_tokenizer)
    assert pairs.path != packs.path
    assert "seq_lengths" in packs.train.column_names
    assert pairs.key == identify_pairs(build_pairs()).key, "what `auto` finds is what was named"


def test_split_keeps_prompts_on_one_side(build_pairs, load_tokenizer):
    sides = []
    for seed in (1, 1, 2):
        prepared = prepare_pairs(build_pairs(make_pairs(60, prompts=13), test_split_size=12, seed=seed), load_tokenizer)
        train, held_out = pairs_of(prepared.train), pairs_of(prepared.eval)
        assert sorted([*train, *held_out]) == list(range(60))
        assert {row % 13 for row in train} & {row % 13 for row in held_out} == set()
        assert 8 <= len(held_out) <= 12
        assert {prepared.manifest[side]["num_pairs"] for side in ("train", "eval")} == {len(train), len(held_out)}
        sides.append(sorted(held_out))
    assert sides[0] == sides[1] != sides[2]


def test_split_keeps_text_prompts_on_one_side(build_pairs, load_tokenizer):
    rows = [{"prompt": f"{n % 10} =", "chosen": f" {n}", "rejected": f" {-n}"} for n in range(1, 41)]
    prepared = prepare_pairs(build_pairs(rows, test_split_size=8), load_tokenizer)
    train, held_out = ({tuple(pair[0]) for pair in pairs_of(side).values()} for side in (prepared.train, prepared.eval))
    assert (len(train), len(held_out)) == (8, 2)
    assert not train & held_out


def test_overlap_of_pairs_and_prompts_is_refused_unless_allowed(build_pairs, load_tokenizer, write_rows):
    same_pair, same_prompt = make_pairs(1, start=2), make_pairs(1, start=105, prompts=100)
    path = write_rows("held_out.jsonl", [*make_pairs(3, start=200), *same_pair, *same_prompt])
    with pytest.raises(DataError) as refused:
        prepare_pairs(build_pairs(dataset_test_split=str(path)), load_tokenizer)
    pair, prompt = (problem.found for problem in refused.value.problems)
    assert "1 training rows are held-out rows too" in pair
    assert "pairs.jsonl:3" in pair
    assert "held_out.jsonl:4" in pair
    assert "2 training rows have the prompt of a held-out row" in prompt
    assert "pairs.jsonl:6" in prompt
    assert "held_out.jsonl:5" in prompt
    prepared = prepare_pairs(build_pairs(dataset_test_split=str(path), allow_eval_overlap=True), load_tokenizer)
    assert len(prepared.eval) == 5


def test_overlong_pairs_are_reported_or_dropped(build_pairs, load_tokenizer, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", 7)
    alone = encode_alone(build_pairs(), tiny_tokenizer)
    lengths = {row: len(prompt) + max(len(chosen), len(rejected)) for row, (prompt, chosen, rejected) in alone.items()}
    limit = sorted(lengths.values())[-4] - 1
    too_long = [row for row, length in lengths.items() if length > limit]
    assert {len(alone[row][1]) > len(alone[row][2]) for row in too_long} == {True, False}
    assert 4 <= len(too_long) < 20
    with pytest.raises(DataError) as refused:
        prepare_pairs(build_pairs(max_length=limit), load_tokenizer)
    (problem,) = refused.value.problems
    assert problem.where.endswith(f"pairs.jsonl:{too_long[0] + 1}")
    first, longest = lengths[too_long[0]], max(lengths.values())
    assert problem.found.startswith(f"{first} tokens, max_length is {limit}; so in {len(too_long)} of 40 rows")
    assert first == longest or f"have {longest} tokens, max_length is {limit}" in problem.found.partition("worst")[2]
    with pytest.raises(DataError, match="max_truncated_fraction"):
        prepare_pairs(build_pairs(max_length=limit, overlong="drop", max_truncated_fraction=0), load_tokenizer)
    prepared = prepare_pairs(build_pairs(max_length=limit, overlong="drop"), load_tokenizer)
    assert sorted(pairs_of(prepared.train)) == [row for row in alone if row not in too_long]
    lost = sum(len(chosen) + len(rejected) for chosen, rejected in (alone[row][1:] for row in too_long))
    assert prepared.manifest["dropped"]["train"] == {
        "num_rows": 40,
        "num_identical": 0,
        "num_overlong": len(too_long),
        "num_answer_tokens": sum(len(chosen) + len(rejected) for _, chosen, rejected in alone.values()),
        "num_lost_tokens": lost,
    }
    exact = prepare_pairs(build_pairs(max_length=max(lengths.values())), load_tokenizer)
    assert len(exact.train) == 40
    assert exact.manifest["max_length"] == max(lengths.values())


def test_pairs_with_equal_answer_tokens_are_dropped_and_counted(build_pairs, load_tokenizer):
    rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 4<|endoftext|>"}]
    rows += [{"prompt": "2 + 2 =", "chosen": f" {number}", "rejected": f" {number + 1}"} for number in range(3)]
    prepared = prepare_pairs(build_pairs(rows), load_tokenizer)
    assert sorted(pairs_of(prepared.train)) == [1, 2, 3]
    assert prepared.manifest["dropped"]["train"]["num_identical"] == 1
    assert any(finding["severity"] == "warning" for finding in prepared.manifest["findings"])


def test_empty_prepared_set_is_refused(build_pairs, load_tokenizer):
    options = {"max_length": 3, "overlong": "drop", "max_truncated_fraction": 1.0}
    with pytest.raises(DataError, match="no pair is left: of 40 rows 0 have the same answer twice, and 40 are longer"):
        prepare_pairs(build_pairs(**options), load_tokenizer)
    with pytest.raises(DataError, match="no pair is left"):
        prepare_pairs(build_pairs(**options, test_split_size=3), load_tokenizer)


def test_margins_are_prepared_and_missing_ones_are_zero(build_pairs, load_tokenizer):
    rows = make_pairs(6)
    rows[1]["margin"], rows[4]["margin"] = 0.5, 3
    prepared = prepare_pairs(build_pairs(rows), load_tokenizer)
    assert [float(row["margin"]) for row in prepared.train] == [0, 0.5, 0, 0, 3, 0]
    assert prepared.train[1]["margin"].dtype == np.float32
    assert prepared.manifest["train"]["num_margins"] == 2
    split = prepare_pairs(build_pairs(rows, test_split_size=2), load_tokenizer)
    assert "margin" in split.train.column_names
    assert "margin" in split.eval.column_names


def test_preference_layout_wins_in_ambiguous_dataset(build_pairs, load_tokenizer):
    rows = make_pairs(4)
    for row in rows:
        row |= {"messages": [*row["prompt"], *row["chosen"]], "score_chosen": 9.0, "score_rejected": 1.0}
    assert len(prepare_pairs(build_pairs(rows), load_tokenizer).train) == 4


def test_part_of_format_auto_is_read_as_pairs(build_config, load_tokenizer, write_rows):
    path = str(write_rows("ambiguous.jsonl", [pair | {"messages": []} for pair in make_pairs(3)]))
    parts = [{"name": path, "format": layout} for layout in ("auto", "preference")]
    first, second = (prepare_pairs(build_config(dataset_mixture=[part]), load_tokenizer) for part in parts)
    assert len(first.train) == 3
    assert first.path == second.path


def test_rows_without_rejected_answer_are_refused(build_pairs, build_config, load_tokenizer, make_chats, write_rows):
    with pytest.raises(DataError, match="the `preference` layout needs `chosen`, `rejected`"):
        prepare_pairs(build_pairs(make_chats(3)), load_tokenizer)
    with pytest.raises(ConfigError, match="the layout `messages`, which has no rejected answers"):
        prepare_pairs(build_pairs(make_chats(3), dataset_format="messages"), load_tokenizer)
    parts = [{"name": str(write_rows("a.jsonl", make_pairs(3))), "format": "sharegpt"}]
    with pytest.raises(ConfigError, match="the layout `sharegpt`"):
        prepare_pairs(build_config(dataset_mixture=parts), load_tokenizer)


def test_eval_datasets_overlap_is_refused_unless_allowed(build_pairs, write_rows, tiny_tokenizer):
    other_answers = [{**row, "chosen": [{"role": "assistant", "content": "Other."}]} for row in make_pairs(3, start=38)]
    sets = {"web": {"name": str(write_rows("web.jsonl", other_answers))}}
    with pytest.raises(DataError, match="2 training rows have the prompt of a held-out row") as raised:
        load_pair_data(build_pairs(eval_datasets=sets), tiny_tokenizer)
    assert "pairs.jsonl:39 = " in str(raised.value)
    assert "web.jsonl:1" in str(raised.value)
    assert len(load_pair_data(build_pairs(eval_datasets=sets, allow_eval_overlap=True), tiny_tokenizer).eval_sets) == 1


def test_eval_datasets_overlap_is_located_in_ambiguous_layout(build_pairs, write_rows, tiny_tokenizer):
    rows = [{**row, "messages": [*row["prompt"], *row["chosen"]]} for row in make_pairs(4)]  # UltraFeedback binarized
    sets = {"web": {"name": str(write_rows("web.jsonl", rows[1:2]))}}
    with pytest.raises(DataError, match="1 training rows have the prompt of a held-out row"):
        load_pair_data(build_pairs(rows, eval_datasets=sets), tiny_tokenizer)

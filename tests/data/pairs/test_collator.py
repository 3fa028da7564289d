"""Batches of pairs in every layout, against a per-answer reference of targets and contexts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.packed.packing import pack_best_fit
from recipes_lib.data.pairs.collator import PairCollator

PAD = 0
LAYOUTS = ["shared", "shared_flat", "separate", "flat"]
sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)


def rows_of(sizes: list[tuple[int, int, int]], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return pairs of random tokens, including the pad id; ``sizes`` are lengths of prompt, chosen, rejected answer."""
    rng = np.random.default_rng(seed)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        {name: rng.integers(0, 50, length).astype(np.uint32) for name, length in zip(names, lengths, strict=True)}
        | {"row_id": 7}
        for lengths in sizes
    ]


def collate(rows, layout="shared", **options) -> dict[str, torch.Tensor]:
    return PairCollator(pad_token_id=PAD, layout=layout, **options)(rows)


def sequences_of(rows) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer of each sequence, in the order of ``sequence_ids``."""
    return [(row["prompt_ids"].tolist(), row[name].tolist()) for row in rows for name in ("chosen_ids", "rejected_ids")]


def may_see(batch: dict[str, torch.Tensor], query: int, key: int) -> bool:
    """Return whether attention from one position to another is allowed, as derived from the batch."""
    width = batch["input_ids"].shape[1]
    if query // width != key // width or key > query:
        return False
    if "part_lengths" in batch:
        lengths = batch["part_lengths"].flatten().tolist()
        parts = [number for number, length in enumerate(lengths) for _ in range(length)]
        return parts[query] // 3 == parts[key] // 3 and parts[key] % 3 in (0, parts[query] % 3)
    if "branch_ids" in batch:
        pair, branch = batch["pair_ids"].flatten().tolist(), batch["branch_ids"].flatten().tolist()
        return pair[query] == pair[key] and branch[key] in (0, branch[query])
    positions = batch["position_ids"].flatten().tolist()
    return 0 not in positions[key + 1 : query + 1]


@settings(max_examples=40)
@given(sizes, st.sampled_from(LAYOUTS), st.booleans())
def test_every_answer_token_is_one_target_with_its_context(sizes, layout, packing):
    rows = rows_of(sizes)
    batch = collate(rows, layout, packing=packing)
    ids, positions = batch["input_ids"].flatten().tolist(), batch["position_ids"].flatten().tolist()
    targets = zip(*(batch[name].tolist() for name in ("sequence_ids", "predictors", "targets")), strict=True)
    expected = [
        (sequence, prompt + answer[:at], token)
        for sequence, (prompt, answer) in enumerate(sequences_of(rows))
        for at, token in enumerate(answer)
    ]
    found = []
    for sequence, place, token in targets:
        seen = [key for key in range(len(ids)) if may_see(batch, place, key)]
        assert [positions[key] for key in seen] == list(range(len(seen)))
        found.append((sequence, [ids[key] for key in seen], token))
    assert found == expected
    for (prompt, answer), place in zip(sequences_of(rows), batch["last_positions"].tolist(), strict=True):
        assert [ids[key] for key in range(len(ids)) if may_see(batch, place, key)] == prompt + answer


@settings(max_examples=40)
@given(sizes, st.sampled_from(LAYOUTS))
def test_batch_has_documented_shapes_and_dtypes(sizes, layout):
    rows = rows_of(sizes)
    batch = collate(rows, layout)
    is_shared = layout.startswith("shared")
    documents = [sum(lengths) if is_shared else lengths[0] + lengths[at] for lengths in sizes for at in (1, 2)]
    documents = documents[::2] if is_shared else documents
    num_rows, width = batch["input_ids"].shape
    if layout.endswith("flat"):
        assert (num_rows, width) == (1, sum(documents))
    else:
        assert width == max(documents)
        assert num_rows == len(pack_best_fit(np.array(documents), width))
    assert batch["num_tokens"] == sum(documents)
    assert batch["num_completion_tokens"].tolist() == [len(answer) for _, answer in sequences_of(rows)]
    grids = {"input_ids", "position_ids"} | ({"pair_ids", "branch_ids"} if layout == "shared" else set())
    lists = {"predictors", "targets", "sequence_ids", "last_positions", "num_completion_tokens", "num_tokens"}
    bounds = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} if layout == "flat" else set()
    bounds |= {"part_lengths"} if layout == "shared_flat" else set()
    assert batch.pop("row_ids").tolist() == [row["row_id"] for row in rows]
    assert batch.pop("token_mask").sum() == batch["num_tokens"]
    assert set(batch) == grids | lists | bounds
    assert {batch[name].shape for name in grids} == {(num_rows, width)}
    assert {batch[name].dtype for name in grids | lists} == {torch.int64}
    assert sorted(batch["sequence_ids"].tolist()) == batch["sequence_ids"].tolist()
    assert int(batch["position_ids"].max()) < max(lengths[0] + max(lengths[1:]) for lengths in sizes)


@settings(max_examples=40)
@given(sizes)
def test_flat_layout_has_document_boundaries(sizes):
    batch = collate(rows_of(sizes), "flat")
    lengths = [prompt + answer for prompt, *answers in sizes for answer in answers]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == max(lengths)
    assert collate(rows_of(sizes), "shared_flat")["part_lengths"].tolist() == [list(pair) for pair in sizes]


@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_unpacked_batch_has_one_document_per_row(layout):
    batch = collate(rows_of([(5, 1, 1), (2, 1, 2), (1, 1, 1)]), layout, packing=False)
    assert len(batch["input_ids"]) == (3 if layout == "shared" else 6)
    assert (batch["position_ids"][:, 0] == 0).all()


def test_extra_columns_keep_pair_order():
    rows = rows_of([(5, 2, 3), (3, 2, 2), (9, 4, 4)])
    for number, row in enumerate(rows):
        row |= {
            "row_id": np.int64(7 - number),
            "margin": np.float32(number / 2),
            "ref_chosen_logp": -number,
            "ref_rejected_logp": -2.5 * number,
        }
    batch = collate(rows)
    assert batch["margin"].tolist() == [0, 0.5, 1]
    assert batch["row_ids"].tolist() == [7, 6, 5]
    assert batch["ref_chosen_logp"].tolist() == [0, -1, -2]
    assert batch["ref_rejected_logp"].tolist() == [0, -2.5, -5]
    assert {batch[name].dtype for name in ("margin", "ref_chosen_logp", "ref_rejected_logp")} == {torch.float32}


def test_collator_accepts_python_lists():
    rows = [{"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [7]}]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert batch["branch_ids"].tolist() == [[0, 0, 1, 1, 2]]
    assert batch["predictors"].tolist() == [1, 2, 1]
    assert batch["targets"].tolist() == [5, 6, 7]
    assert batch["sequence_ids"].tolist() == [0, 0, 1]
    assert batch["last_positions"].tolist() == [3, 4]

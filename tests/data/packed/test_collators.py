"""Batches of packs in every layout: token positions, document boundaries, padding and isolation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from recipes_lib.data.packed.collators import IGNORE_INDEX, PackedCollator

PAD = 0
packs = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


def rows_of(packs: list[list[int]], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return packs of random tokens, including the pad id; ``packs`` are the lengths of their documents."""
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(0, 9, sum(lengths)).astype(np.uint32),
            "loss_mask": rng.random(sum(lengths)) < 0.7,
            "seq_lengths": np.array(lengths, np.int32),
            "row_ids": np.arange(len(lengths)),
        }
        for lengths in packs
    ]


def split_padding(num_tokens: int, packs: list[list[int]]) -> list[int]:
    """Return the lengths of the padding documents: none is longer than the longest document of ``packs``."""
    whole, rest = divmod(num_tokens, max(map(max, packs)))
    return [max(map(max, packs))] * whole + [rest] * (rest > 0)


@settings(max_examples=40)
@given(packs)
def test_batch_places_tokens_documents_and_targets(packs):
    rows = rows_of(packs)
    batch = PackedCollator(pad_token_id=PAD)(rows)
    length = batch["input_ids"].shape[1]
    assert batch.pop("num_tokens") == sum(map(sum, packs))
    assert batch.pop("row_ids").tolist() == [number for lengths in packs for number in range(len(lengths))]
    is_real = [[at < sum(lengths) for at in range(length)] for lengths in packs]
    assert batch.pop("token_mask").tolist() == is_real
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(tensor.dtype == torch.int64 and tensor.shape == (len(rows), length) for tensor in batch.values())
    assert length == max(map(sum, packs))
    for at, (row, lengths) in enumerate(zip(rows, packs, strict=True)):
        padded = split_padding(length - sum(lengths), packs)
        positions = [position for n in (*lengths, *padded) for position in range(n)]
        assert batch["position_ids"][at].tolist() == positions
        padding = length - sum(lengths)
        assert batch["input_ids"][at].tolist() == [*row["input_ids"].tolist(), *[PAD] * padding]
        labels = [
            token if target and position else IGNORE_INDEX
            for token, target, position in zip(row["input_ids"], row["loss_mask"], positions, strict=False)
        ]
        assert batch["labels"][at].tolist() == [*labels, *[IGNORE_INDEX] * padding]


@settings(max_examples=40)
@given(packs)
def test_flat_layout_agrees_with_transformers(packs):
    rows = rows_of(packs)
    documents = []
    for row in rows:
        ends = np.cumsum(row["seq_lengths"])[:-1]
        for ids, mask in zip(np.split(row["input_ids"], ends), np.split(row["loss_mask"], ends), strict=True):
            labels = np.where(mask, ids.astype(np.int64), IGNORE_INDEX)
            documents.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True, separator_id=IGNORE_INDEX)(documents)
    batch = PackedCollator(pad_token_id=PAD, layout="flat")(rows)
    for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].tolist() == expected[name].tolist()
        assert batch[name].dtype == expected[name].dtype
    assert batch["max_length_q"] == batch["max_length_k"] == expected["max_length_q"]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_empty_rows_give_empty_batch(layout):
    empty = {"input_ids": np.zeros(0, np.uint32), "loss_mask": np.zeros(0, np.bool_), "seq_lengths": np.zeros(0, int)}
    batch = PackedCollator(pad_token_id=PAD, layout=layout)([empty, empty])
    assert batch["num_tokens"] == 0
    for name in ("input_ids", "labels", "position_ids"):
        assert batch[name].dtype == torch.int64
        assert batch[name].shape == (2 if layout == "rows" else 1, 0)
    if layout == "flat":
        assert (batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]) == ([0], 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logits_equal_single_document_logits(tiny_model_dir, attention):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=attention).eval()
    packs = [[5, 9, 3], [4, 8]]
    rows = rows_of(packs)
    batch = PackedCollator(pad_token_id=PAD)(rows)
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        packed = model(**inputs, use_cache=False).logits
        for at, lengths in enumerate(packs):
            ends = np.cumsum([0, *lengths])
            for start, stop in itertools.pairwise(ends):
                alone = model(batch["input_ids"][at : at + 1, start:stop], use_cache=False).logits[0]
                torch.testing.assert_close(packed[at, start:stop], alone, atol=1e-4, rtol=0)

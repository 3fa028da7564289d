"""Context parallelism: shards of a batch have every token, target and key, and equal work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.training.layouts.context_rows import join_context, shard_batch
from recipes_lib.training.layouts.launch_environment import Launch

ROWS = ([5, 9, 3, 6], [11, 2], [1, 1, 20])


def build_batch(*lengths: list[int]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows = [
        {"input_ids": random.integers(1, 97, sum(row)), "loss_mask": random.random(sum(row)) < 0.8, "seq_lengths": row}
        for row in lengths
    ]
    return PackedCollator(pad_token_id=0)(rows)


def shard_all(batch: dict[str, Any], size: int, *, by_heads: bool = False) -> list[dict[str, Any]]:
    return [shard_batch(batch, rank, size, by_heads=by_heads) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_each_token_and_target_is_on_one_rank(size: int) -> None:
    batch = build_batch(*ROWS)
    parts = shard_all(batch, size)
    assert len({part["input_ids"].shape for part in parts}) == 1
    for name in ("input_ids", "position_ids", "labels"):
        together = torch.cat([part[name] for part in parts], dim=1).flatten().sort().values
        padded = together.numel() - batch[name].numel()
        assert padded < 2 * size * len(ROWS)
    whole, found = batch["labels"], torch.cat([part["labels"] for part in parts], dim=1)
    assert found[found != -100].sort().values.equal(whole[whole != -100].sort().values)
    # The target of a token is the next one, even if another rank has it.
    targets = torch.cat([part["targets"] for part in parts], dim=1)
    assert targets[targets != -100].sort().values.equal(whole[whole != -100].sort().values)
    assert sum(int(part["num_tokens"]) for part in parts) == int(batch["num_tokens"]) == sum(map(sum, ROWS))


@pytest.mark.parametrize("size", [2, 3])
def test_keys_of_token_are_its_document_up_to_itself(size: int) -> None:
    batch = build_batch(*ROWS)
    parts = shard_all(batch, size)
    gathered = torch.cat([part["input_ids"].flatten() for part in parts])
    positions = torch.cat([part["position_ids"].flatten() for part in parts])
    for part in parts:
        queries, keys = part["cu_seq_lens_q"], part["cu_seq_lens_k"]
        assert queries[-1] == part["input_ids"].numel()
        own = list(zip(part["input_ids"].flatten(), part["position_ids"].flatten(), strict=True))
        for run in range(len(queries) - 1):
            index = part["context_index"][keys[run] : keys[run + 1]]
            # Keys are the document from its start, in order; the queries are the last ones.
            assert positions[index].tolist() == list(range(len(index)))
            last = own[queries[run] : queries[run + 1]]
            assert [int(token) for token, _ in last] == gathered[index][-len(last) :].tolist()
            assert [int(at) for _, at in last] == positions[index][-len(last) :].tolist()
        assert part["max_length_q"] == int(queries.diff().max())
        assert part["max_length_k"] == int(keys.diff().max())


@pytest.mark.parametrize("size", [2, 3])
def test_sharding_by_heads_attends_within_whole_documents(size: int) -> None:
    batch = build_batch(*ROWS)
    parts = shard_all(batch, size, by_heads=True)
    tokens, positions = (torch.cat([part[name].flatten() for part in parts]) for name in ("input_ids", "position_ids"))
    for part in parts:
        bounds, index = part["cu_seq_lens_q"], part["context_index"]
        assert bounds.equal(part["cu_seq_lens_k"])
        # A permutation, in row order, so that outputs can be scattered back.
        assert index.sort().values.tolist() == list(range(len(positions)))
        assert tokens[index].view(len(ROWS), -1)[:, : batch["input_ids"].shape[1]].equal(batch["input_ids"])
        documents = torch.split(positions[index], bounds.diff().tolist())
        assert all(document.tolist() == list(range(len(document))) for document in documents)


def test_attention_pairs_of_long_document_are_balanced() -> None:
    pairs = []
    for part in shard_all(build_batch([64]), 4):
        queries, keys = part["cu_seq_lens_q"].diff(), part["cu_seq_lens_k"].diff()
        pairs.append(int((queries * (keys - queries) + queries * (queries + 1) // 2).sum()))
    assert len(set(pairs)) == 1
    assert sum(pairs) == 64 * 65 // 2


def test_batch_without_rows_has_no_keys() -> None:
    batch = build_batch([4])
    empty = {name: tensor[:0] if tensor.ndim else tensor for name, tensor in batch.items()}
    assert [part["context_index"].tolist() for part in shard_all(empty, 2)] == [[], []]


def test_join_context_is_noop_without_context_parallelism() -> None:
    args: Any = None
    assert join_context(Launch(rank=0, local_rank=0, world_size=4, engine="FSDP"), args) is None

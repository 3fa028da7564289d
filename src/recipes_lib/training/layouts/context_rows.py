"""Context parallelism in the trainers: process group, tokens of a rank, and indices of its keys."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import TrainingArguments

from recipes_lib.data.packed.collators import IGNORE_INDEX
from recipes_lib.losses.next_token import index_targets
from recipes_lib.models.parallel.context_parallel import ContextParallelGroup
from recipes_lib.training.layouts.launch_environment import Launch


def join_context(launch: Launch, args: TrainingArguments) -> ContextParallelGroup | None:
    """Build the context-parallel group of this process, ``None`` without context parallelism; all ranks must call.

    Args:
        launch: The launch.
        args: From ``build_training_arguments``, which has initialised the process group.
    """
    if launch.context_size == 1:
        return None
    sizes = (launch.data_size, launch.context_size)
    mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=("data", "context"))
    return ContextParallelGroup(
        group=mesh.get_group("context"),
        rank=launch.context_rank,
        size=launch.context_size,
        data_group=mesh.get_group("data"),
        by_heads=launch.shares_by_heads,
    )


def shard_batch(batch: Mapping[str, Any], rank: int, num_processes: int, *, by_heads: bool) -> dict[str, Any]:
    """Return the local part of a batch: two of the ``2n`` pieces of each row, for ``n`` context-parallel ranks.

    With causal attention, the first piece of a row attends to the fewest tokens and the last to the most. Rank ``r``
    has pieces ``r`` and ``2n - 1 - r``, which balances the work; Ulysses uses the same pieces without need.

    Args:
        batch: From ``PackedCollator`` with the layout ``rows``, ``(B, L)``; the same on all ranks of the group.
        rank: Rank of this process in its context-parallel group.
        num_processes: Size of the group.
        by_heads: As ``ContextParallelGroup``.

    Returns:
        Local tokens ``(B, 2 * ceil(L / 2n))``: ``input_ids``, ``position_ids`` and ``labels``. Loss: ``targets``, the
        label of each token's successor, which another rank may hold; ``target_positions``, indices of targets that are
        not ignored; ``num_tokens`` of the whole batch on rank 0, and 0 on other ranks. Attention: ``cu_seq_lens_q``,
        ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of the runs of queries, and ``context_index``, the
        indices of their keys among the gathered tokens. With Ulysses, a run is a whole document.
    """
    # Indices are computed on the host, so that building them does not synchronise with the device.
    batch = {name: batch[name].cpu() for name in ("input_ids", "position_ids", "labels", "num_tokens")}
    length = batch["input_ids"].shape[1]
    piece = -(-length // (2 * num_processes))
    padding = 2 * num_processes * piece - length
    # Padding is a separate document: its positions restart at 0.
    padding_positions = torch.arange(padding).expand(len(batch["input_ids"]), -1)
    positions = torch.cat([batch["position_ids"], padding_positions], dim=1)
    labels = functional.pad(batch["labels"], (0, padding), value=IGNORE_INDEX)
    whole = {
        "input_ids": functional.pad(batch["input_ids"], (0, padding)),
        "position_ids": positions,
        "labels": labels,
        "targets": functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX),
    }
    starts = (rank * piece, (2 * num_processes - 1 - rank) * piece)
    columns = torch.cat([torch.arange(start, start + piece) for start in starts])
    own = {name: tensor[:, columns].contiguous() for name, tensor in whole.items()}
    num_tokens = batch["num_tokens"] if rank == 0 else torch.zeros_like(batch["num_tokens"])
    attending = [(0, positions.shape[1])] if by_heads else [(start, start + piece) for start in starts]
    own["target_positions"] = index_targets(own["targets"])
    return {**own, "num_tokens": num_tokens, **_find_keys(positions.numpy(), attending, num_processes)}


def _find_keys(positions: Any, attending: Sequence[tuple[int, int]], num_processes: int) -> dict[str, Any]:
    """Keys of each run of queries; a run is the part of a document in one ``attending`` piece of a row."""
    # Rank that holds each of the 2n pieces of a row.
    owners = [min(at, 2 * num_processes - 1 - at) for at in range(2 * num_processes)]
    row = np.arange(positions.shape[1])
    piece = len(row) // len(owners)
    # Index of each token of row 0 among the all-gathered tokens, ordered by rank, then row, then head and tail piece.
    number, offset = row // piece, row % piece
    place = np.array(owners)[number] * len(positions) * 2 * piece + np.where(number < num_processes, 0, piece) + offset
    queries, keys, index = [0], [0], []
    for at, line in enumerate(positions):
        bounds = np.append(np.flatnonzero(line == 0), len(line))  # Position 0 begins a document.
        for start, stop in attending:
            for first, behind in itertools.pairwise(bounds):
                begin, end = max(first, start), min(behind, stop)
                if begin < end:
                    # The kernel aligns causal masks at the end: the last query attends to all keys of its run.
                    queries.append(end - begin)
                    keys.append(end - first)
                    index.append(place[first:end] + at * 2 * piece)
    return {
        "cu_seq_lens_q": torch.tensor(queries).cumsum(0, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(keys).cumsum(0, dtype=torch.int32),
        "max_length_q": int(max(queries)),
        "max_length_k": int(max(keys)),
        # ``concatenate`` needs one array: an empty placeholder of a batch-size ramp has no keys.
        "context_index": torch.from_numpy(np.concatenate([*index, row[:0]])),
    }

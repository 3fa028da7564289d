"""Context parallelism in the trainers: the tokens of a rank, and its attention index."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import TrainingArguments

from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.losses.next_token import index_targets
from recipes_lib.models.parallel.context_parallel import ContextParallelGroup
from recipes_lib.training.layouts.launch_environment import Launch


def join_context(launch: Launch, args: TrainingArguments) -> ContextParallelGroup | None:
    """Build the context-parallel group of this process; ``None`` if every rank has its own rows. All ranks must call.

    Args:
        launch: How they were started.
        args: Of the trainer; the process group exists.
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
    """Local part of a batch: one piece from the head of each row and one from its tail.

    A row is split into twice as many pieces as ranks. With causal attention, the first piece attends to the fewest
    tokens and the last to the most; pairing them balances the work. With Ulysses it is balanced in any case.

    Args:
        batch: As ``PackedCollator`` makes it in the layout ``rows``; alike on all processes that share it.
        rank: Of this process among them.
        num_processes: That share it.
        by_heads: As ``ContextParallelGroup``.

    Returns:
        The tokens of this process, ``(B, 2 * L / 2n)``: ``input_ids``, ``position_ids``, ``labels``, and ``targets``,
        the label of the token behind each, which may be another process's; ``target_positions``, where those are that
        are not ignored; ``num_tokens`` of the whole batch on the first process and 0 on the others. Besides, for the
        attention: ``cu_seq_lens_q``, ``cu_seq_lens_k``,
        ``max_length_q`` and ``max_length_k`` of what attends together, and ``context_index``, where among the gathered
        tokens the keys of each stand: by heads those of whole documents, which are the queries too.
    """
    # The index is computed on the host, wherever the loader placed the batch.
    batch = {name: batch[name].cpu() for name in ("input_ids", "position_ids", "labels", "num_tokens")}
    length = batch["input_ids"].shape[1]
    piece = -(-length // (2 * num_processes))
    padding = 2 * num_processes * piece - length
    # Padding is a separate document.
    restarted = torch.arange(padding).expand(len(batch["input_ids"]), -1)
    positions = torch.cat([batch["position_ids"], restarted], dim=1)
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
    # Pieces of a row in order, as all-gathered rank by rank.
    owners = [min(at, 2 * num_processes - 1 - at) for at in range(2 * num_processes)]
    row = np.arange(positions.shape[1])
    piece = len(row) // len(owners)
    # Where each token of a row stands among the gathered ones: rank by rank, of each rank row by row, of each row the
    # piece from the head and then that from the tail.
    number, offset = row // piece, row % piece
    place = np.array(owners)[number] * len(positions) * 2 * piece + np.where(number < num_processes, 0, piece) + offset
    queries, keys, index = [0], [0], []
    for at, line in enumerate(positions):
        bounds = np.append(np.flatnonzero(line == 0), len(line))  # Positions start at 0 with each document.
        for start, stop in attending:
            for first, behind in itertools.pairwise(bounds):
                begin, end = max(first, start), min(behind, stop)
                if begin < end:
                    # Causal from the end: the last query sees all keys, the one before it one fewer.
                    queries.append(end - begin)
                    keys.append(end - first)
                    index.append(place[first:end] + at * 2 * piece)
    return {
        "cu_seq_lens_q": torch.tensor(queries).cumsum(0, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(keys).cumsum(0, dtype=torch.int32),
        "max_length_q": int(max(queries)),
        "max_length_k": int(max(keys)),
        # An empty batch, a placeholder during a batch ramp, has no keys.
        "context_index": torch.from_numpy(np.concatenate([*index, row[:0]])),
    }

"""The processes of a launch as pipelines side by side: who hands states on to whom, and who adds up gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class StageMesh:
    """The groups that this process is in.

    Attributes:
        pipeline: The stages of its pipeline, in their order.
        replicas: Those that hold the same part and take other rows.
        ends: First and last stage of its pipeline, which share tied embeddings; the others are not in it.
    """

    pipeline: ProcessGroup
    replicas: ProcessGroup
    ends: ProcessGroup


@functools.cache
def build_stage_mesh(num_stages: int) -> StageMesh:
    """Return the groups of this process; every process must call, with the same number.

    Args:
        num_stages: Processes of a pipeline; the process group exists, and has a multiple of it.
    """
    rank, num_replicas = distributed.get_rank(), distributed.get_world_size() // num_stages
    columns = [list(range(first, num_replicas * num_stages, num_replicas)) for first in range(num_replicas)]
    rows = [list(range(num_replicas * stage, num_replicas * (stage + 1))) for stage in range(num_stages)]
    ends = [sorted({ranks[0], ranks[-1]}) for ranks in columns]
    # Each process takes part in making every group.
    pipelines, replicas, pairs = ([distributed.new_group(ranks) for ranks in kind] for kind in (columns, rows, ends))
    stage, replica = divmod(rank, num_replicas)
    return StageMesh(pipelines[replica], replicas[stage], pairs[replica])

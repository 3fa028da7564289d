"""Process groups of pipeline parallelism: pipelines, replicas of a stage, and first and last stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes_lib.models.parallel.pipeline_parallel import build_pipeline_mesh
from recipes_lib.training.layouts.launch_environment import Launch, Layout
from recipes_lib.training.layouts.pipeline_schedule import build_pipeline_groups


def clear_caches() -> None:
    build_pipeline_groups.cache_clear()
    build_pipeline_mesh.cache_clear()


@pytest.fixture(autouse=True)
def fresh_groups() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "pipeline", "replicas", "ends"),
    [
        (0, [0, 2, 4], [0, 1], [0, 4]),
        (1, [1, 3, 5], [0, 1], [1, 5]),
        (4, [0, 2, 4], [4, 5], [0, 4]),
        (5, [1, 3, 5], [4, 5], [1, 5]),
    ],
)
def test_pipeline_groups_are_strided_over_ranks(rank, pipeline, replicas, ends) -> None:
    distributed.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
    mesh = build_pipeline_groups(3)
    assert distributed.get_process_group_ranks(mesh.pipeline) == pipeline
    assert distributed.get_process_group_ranks(mesh.replicas.get_group()) == replicas
    assert distributed.get_process_group_ranks(mesh.ends) == ends
    assert build_pipeline_groups(3) is mesh
    # ``Launch`` assigns the same stage.
    part = Launch(rank, 0, 6, "", layout=Layout(pipeline_stages=3)).part
    assert part is not None
    assert part.stage == pipeline.index(rank) == distributed.get_rank(mesh.pipeline)


@pytest.mark.parametrize(
    ("rank", "pipeline", "replicas", "tensors"),
    [(0, [0, 4], [0, 2], [0, 1]), (3, [3, 7], [1, 3], [2, 3]), (6, [2, 6], [4, 6], [6, 7])],
)
def test_tensor_parallel_ranks_are_adjacent(rank, pipeline, replicas, tensors) -> None:
    distributed.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    mesh = build_pipeline_groups(2, 2)
    assert (
        distributed.get_process_group_ranks(mesh.pipeline) == distributed.get_process_group_ranks(mesh.ends) == pipeline
    )
    assert distributed.get_process_group_ranks(mesh.replicas.get_group()) == replicas
    assert distributed.get_process_group_ranks(build_pipeline_mesh(2, 2).get_group("tp")) == tensors
    launch = Launch(rank, 0, 8, "FSDP", layout=Layout(pipeline_stages=2, sizes={"tp": 2, "dp_shard": 2}))
    assert launch.part is not None
    assert (launch.part.stage, launch.part.tensor_size) == (pipeline.index(rank), 2)
    assert (launch.data_size, launch.data_rank, rank % 2) == (2, replicas.index(rank), tensors.index(rank))


def test_ends_group_of_two_stages_is_pipeline() -> None:
    distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = build_pipeline_groups(2)
    assert distributed.get_process_group_ranks(mesh.ends) == [0, 1]
    assert distributed.get_process_group_ranks(mesh.replicas.get_group()) == [1]

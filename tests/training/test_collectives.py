"""Without a process group every collective is that of one process; with one, ranks and values are those of all."""

from __future__ import annotations

from recipes_lib.training import collectives


def test_one_process_is_rank_0_of_1_and_has_its_own_values() -> None:
    assert not collectives.is_distributed()
    assert (collectives.get_rank(), collectives.get_world_size()) == (0, 1)
    collectives.barrier()
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]
    assert collectives.broadcast_object("seen") == "seen"
    assert collectives.sum_over_processes([1, 2.5]) == [1, 2.5]

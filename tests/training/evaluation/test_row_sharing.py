"""Every row is counted once, by one process, and no process waits for another."""

import pytest

from recipes_lib.training.evaluation import held_out
from recipes_lib.training.evaluation.held_out import count_rounds, share_rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_row_counts_once_and_all_take_as_many_batches(monkeypatch, world_size, num_rows, batch_size):
    monkeypatch.setattr(held_out, "get_world_size", lambda group: world_size)
    counted, rounds = [], set()
    for rank in range(world_size):
        monkeypatch.setattr(held_out, "get_rank", lambda group, rank=rank: rank)
        shares = list(share_rows(num_rows, batch_size))
        rounds.add(len(shares))
        assert all(0 < len(rows) <= batch_size for rows, _ in shares)
        counted += [row for rows, is_counted in shares if is_counted for row in rows]
    assert sorted(counted) == list(range(num_rows))
    assert rounds == {count_rounds(num_rows, batch_size)}


def test_without_processes_the_rows_come_in_order():
    assert [list(rows) for rows, _ in share_rows(5, 2)] == [[0, 1], [2, 3], [4]]

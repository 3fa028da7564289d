"""Local workers of a corpus: how many, and what an error leaves undone."""

import os
from concurrent.futures import Future

import pytest

from recipes_lib.corpus import cleaning
from recipes_lib.errors import DataError


def test_workers_are_the_cores_of_this_process_where_the_system_tells_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert cleaning.count_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cleaning.count_cores() == os.cpu_count()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "disk full"), DataError()])
def test_an_error_of_a_task_waits_for_no_task_that_has_not_begun(error):
    class Pool:
        """Runs nothing; the first task has failed."""

        def submit(self, function, *arguments):
            future = Future()
            if arguments[1] == 0:
                future.set_exception(error)
            return future

        def shutdown(self, *, cancel_futures):
            self.is_cancelled = cancel_futures

    pool = Pool()
    with pytest.raises(type(error)):
        list(cleaning._run_tasks([(None, rank) for rank in range(3)], pool, "cleaning"))
    assert pool.is_cancelled

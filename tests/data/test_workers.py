"""Worker processes: order, read-ahead, errors, and their end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from recipes_lib.data.workers import MIN_ITEMS, map_in_order
from recipes_lib.errors import ConfigError, DataError, Problem

PROBLEMS = Problem("a.jsonl:3", "broken", "mend it"), Problem("a.jsonl:4", "too")


@pytest.fixture
def one_process():
    """No patch: the default number of workers is that of users."""


@pytest.mark.parametrize(
    ("num_items", "num_workers"),
    [(0, 2), (1, 1), (MIN_ITEMS - 1, 2), (MIN_ITEMS, 5), (MIN_ITEMS + 1, 2), (23, 1), (23, 3), (23, None)],
)
def test_results_are_in_order(num_items, num_workers):
    def work(item):
        return item**2, "x" * (1 << 17), os.getpid()  # More than a pipe holds.

    squares, _, pids = zip(*map_in_order(work, range(num_items), num_workers), strict=True) if num_items else ((),) * 3
    assert squares == tuple(number**2 for number in range(num_items))
    if num_workers and num_items >= MIN_ITEMS:
        assert len(set(pids)) == min(num_workers, num_items)
        assert (os.getpid() in pids) == (num_workers == 1)


@pytest.mark.parametrize("num_workers", [2, 5])
def test_items_are_read_as_results_are_taken(num_workers):
    numbers = itertools.count()
    results = map_in_order(abs, numbers, num_workers)
    assert list(itertools.islice(results, 10)) == list(range(10))
    assert next(numbers) <= 10 + max(MIN_ITEMS, num_workers)
    results.close()


def test_workers_end_with_generator():
    results = map_in_order(abs, itertools.count(), 3)
    next(results)
    started = multiprocessing.active_children()
    assert len(started) >= 3
    results.close()
    assert not any(process in multiprocessing.active_children() for process in started)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_user_error_keeps_problems(num_workers):
    def fail(item):
        if item == 6:
            raise DataError(*PROBLEMS)
        return item

    results = map_in_order(fail, range(9), num_workers)
    with pytest.raises(DataError) as caught:
        list(results)
    assert tuple(caught.value.problems) == PROBLEMS


def test_other_error_has_its_traceback():
    def fail(item):
        raise ZeroDivisionError(f"of item {item}")

    with pytest.raises(RuntimeError, match=r"in fail\n(.|\n)*ZeroDivisionError: of item 0"):
        list(map_in_order(fail, range(9), 2))


def test_killed_worker_is_named():
    def die(item):
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(ConfigError, match="dataset_num_proc: a process that tokenises was killed"):
        list(map_in_order(die, range(20), 2))


def test_worker_without_memory_is_named(capfd):
    def fill(item):
        raise MemoryError(f"Unable to allocate {item} GiB")

    with pytest.raises(ConfigError, match=r"dataset_num_proc: a process that tokenises was killed.*memory"):
        list(map_in_order(fill, range(20), 2))
    assert capfd.readouterr().err == ""


def test_workers_end_with_killed_parent():
    # The pipe of its output is inherited by the workers, so that its end is read when all of them have ended.
    program = """
import itertools, os, signal
from recipes_lib.data.workers import map_in_order
results = map_in_order(abs, itertools.count(), 3)
print(next(results), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "0\n", "")

"""A function applied to items by forked worker processes, with the results in order."""

from __future__ import annotations

import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final, Generic, TypeVar

from recipes_lib import processes
from recipes_lib.errors import ConfigError, Problem, UserError

MAX_DEFAULT: Final = 8
"""Workers by default: this process takes about as long to read rows as eight workers to encode them."""
MIN_ITEMS: Final = 4
"""Number of items from which on workers are started."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` for each item, in order; few items are not worth a worker.

    Items are read ahead, at most ``MIN_ITEMS`` or, if more, the number of workers. Workers are forked, as those of a
    data loader, so that ``function`` need not be picklable, and no import is repeated. It must not use an accelerator,
    or a lock of another thread.

    Args:
        function: Function without side effects; its items and results are pickled.
        items: The items; read in this process.
        num_workers: Number of worker processes. Default: the cores of this process, at most ``MAX_DEFAULT``.

    Raises:
        ConfigError: A worker was killed.
        UserError: As ``function``.
        RuntimeError: ``function`` raises anything else in a worker; has the traceback.
    """
    num_workers = num_workers or min(MAX_DEFAULT, processes.count_cores())
    first = list(islice(items := iter(items), MIN_ITEMS))
    items = chain(first, items)
    if num_workers == 1 or len(first) < MIN_ITEMS or sys.platform != "linux":  # macOS: no fork without exec.
        yield from map(function, items)
        return
    with ExitStack() as stack:
        busy = deque[_Worker[Item, Result]]()
        for item in islice(items, num_workers):
            worker = stack.enter_context(closing(_Worker(function)))
            worker.send(item)
            busy.append(worker)
        for item in items:
            worker = busy.popleft()
            result = worker.receive()
            worker.send(item)
            busy.append(worker)
            yield result
        yield from (worker.receive() for worker in busy)


class _Worker(Generic[Item, Result]):
    """A forked process that applies a function to one item at a time: with two, both ends could wait in a send.

    It ends when its parent does, even if that is killed: the last worker then reads the end of its pipe, and those
    before it, whose pipes it has inherited, follow.
    """

    def __init__(self, function: Callable[[Item], Result]) -> None:
        context = get_context("fork")
        self._pipe, others = context.Pipe()
        self._process = context.Process(target=_work, args=(function, self._pipe, others), daemon=True)
        self._process.start()
        others.close()

    def send(self, item: Item) -> None:
        with _explain_death():
            self._pipe.send(item)

    def receive(self) -> Result:
        with _explain_death():
            answer: Result | Exception = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(function: Callable[[Item], Result], parents: Connection, pipe: Connection) -> None:
    """Answer items with an error or a result until the parent ends the process, or ends itself."""
    parents.close()
    # The Ctrl-C of a terminal reaches all processes, and the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.disable_tokenizer_threads()
    # Out of memory, it ends as if the kernel had killed it.
    with suppress(EOFError, ConnectionError, MemoryError):
        while True:
            item = pipe.recv()
            try:
                answer: Result | Exception = function(item)
            except UserError as error:
                answer = error
            except MemoryError:
                raise
            except Exception:  # Not every exception can be pickled.
                answer = RuntimeError(traceback.format_exc())
            pipe.send(answer)


@contextmanager
def _explain_death() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        found = "a process that tokenises was killed, perhaps for its memory"
        raise ConfigError(Problem("dataset_num_proc", found, "set it lower, or to 1")) from error

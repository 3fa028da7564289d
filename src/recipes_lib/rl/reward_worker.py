"""A reward function in a process of its own, where one that hangs or crashes costs its answer and not the run.

``python -m recipes_lib.rl.reward_worker MODULE:FUNCTION FD`` answers over a socket; torch is not imported.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from recipes_lib.errors import escape_controls
from recipes_lib.training.guards.watchdog import WATCHDOG

_SECONDS_TO_IMPORT: Final = 300.0
_SECONDS_BETWEEN_LOOKS: Final = 5.0
_OF_TRL: Final = "trl.rewards"
_NEED_MATH_VERIFY: Final = {
    (_OF_TRL, name) for name in ("accuracy_reward", "get_cosine_scaled_reward", "reasoning_accuracy_reward")
}
_NUM_WORKERS: Final = min(8, os.cpu_count() or 1)
MAX_LIMITS: Final = 10
"""Times the limit of a call that answers may take which are scored one by one."""


def find_function(path: str) -> Callable[..., Any]:
    """Import ``package.module:function``, also from the working directory.

    ``package.module:factory(name=value, ...)`` is what a function returns for constants. TRL's own reward functions,
    which read chats alone, get an answer to a text as a chat of one message.

    Raises:
        ImportError: It needs a package that is not installed.
        TypeError: It is no function; importing runs the user's code, which may raise anything besides.
        ValueError: Something else than constants by name is between the parentheses.
    """
    # Python looks beside the recipe, not where the command is given; last, so that nothing is shadowed.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    target, opened, arguments = path.partition("(")
    module_name, _, name = target.partition(":")
    if (module_name, name) in _NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise ImportError("it needs math-verify: pip install 'recipes-lib[math]'")
    found: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    if opened:
        found = found(**_read_constants(f"f({arguments}"))
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return functools.partial(_ask_with_chats, found) if module_name == _OF_TRL else found


def _read_constants(text: str) -> dict[str, Any]:
    """The constants by name of a call.

    Raises:
        ValueError: There is something else.
    """
    called = ast.parse(text, mode="eval").body
    is_plain = isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and not called.args
    if not isinstance(called, ast.Call) or not is_plain or None in [keyword.arg for keyword in called.keywords]:
        raise ValueError("write name=value between the parentheses")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in called.keywords}


def _ask_with_chats(function: Callable[..., Any], *, completions: Sequence[Any], **given: Any) -> Any:
    chats = [[{"role": "assistant", "content": text}] if isinstance(text, str) else text for text in completions]
    return function(completions=chats, **given)


def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function by name; one that is ``async`` is waited for."""
    result = function(**given)
    return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(result: Any) -> Any:
    return await result


class _LostError(Exception):
    """The function gave no result."""


class IsolatedFunction:
    """A reward function with a time limit.

    All answers are scored by one call. Where it fails, each answer is scored alone, by as many processes as there are
    cores, for at most ``MAX_LIMITS`` times the limit of a call; answers that fail again or have had no turn by then are
    not scored. Where that is so of all of several, the fault is the function's.

    Source: ``tests/rl/test_reward_worker.py``.
    """

    def __init__(self, path: str, seconds: float) -> None:
        """Start nothing yet.

        Args:
            path: ``package.module:function``.
            seconds: That a call may take.
        """
        self._path, self._seconds = path, seconds
        self._workers = [_Worker(path, seconds) for _ in range(_NUM_WORKERS)]

    def __call__(self, **given: Sequence[Any]) -> Sequence[Any]:
        """Score answers.

        Raises:
            RuntimeError: No answer of several could be scored.
        """
        try:
            scores: Sequence[Any] = self._workers[0].ask(given)
        except _LostError:
            pass
        else:
            return scores
        rows = range(len(given["completions"]))
        found = self._ask_for_each([{name: [column[row]] for name, column in given.items()} for row in rows])
        lost = [error for error in found if isinstance(error, _LostError)]
        if len(lost) == len(found) > 1:
            raise RuntimeError(str(lost[0]))
        if lost:
            told = f"warning: {self._path} gave {len(lost)} of {len(found)} answers no score: {lost[0]}"
            sys.stderr.write(f"{escape_controls(told)}\n")
        return [score for scores in found for score in ([None] if isinstance(scores, _LostError) else scores)]

    def _ask_for_each(self, alone: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The function's result for each answer, or why there is none."""
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)
        end = time.monotonic() + MAX_LIMITS * self._seconds

        def ask(given: Mapping[str, Any]) -> Any:
            worker = idle.get()
            try:
                if time.monotonic() > end:
                    raise _LostError(f"others took {MAX_LIMITS} times the {self._seconds:g} s of a call")
                return worker.ask(given)
            except _LostError as error:
                return error
            finally:
                WATCHDOG.beat()
                idle.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(ask, alone))


class _Worker:
    """One process that runs a function; the next call after one that failed in another way starts another."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, given: Mapping[str, Any]) -> Any:
        """The function's result for some answers.

        Raises:
            _LostError: It raised, took too long, or its process ended.
        """
        try:
            connection = self._connection or self._start()
            connection.send(given)
            if not connection.poll(self._seconds):
                raise _LostError(f"it took more than {self._seconds:g} s")
            is_done, result = connection.recv()
        except (EOFError, OSError) as error:
            raise _LostError(f"its process ended with {self._end()}") from error
        except _LostError:
            self._end()
            raise
        if not is_done:
            raise _LostError(result)
        return result

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", __name__, self._path, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        weakref.finalize(self, self._process.kill)
        self._connection = ours
        if not ours.poll(_SECONDS_TO_IMPORT):
            raise _LostError(f"it was not imported within {_SECONDS_TO_IMPORT:g} s")
        is_done, words = ours.recv()
        if not is_done:
            raise _LostError(words)
        return ours

    def _end(self) -> int:
        """End the process and return its exit code; the next call starts another."""
        assert self._process is not None
        assert self._connection is not None
        self._process.kill()
        self._connection.close()
        code, self._process, self._connection = self._process.wait(), None, None
        return code


def main(path: str, descriptor: int) -> None:
    """Answer until the other end is gone."""
    connection, parent = Connection(descriptor), os.getppid()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        function = find_function(path)
    except Exception as error:  # Importing runs the user's code, which may raise anything.
        connection.send((False, f"{type(error).__name__}: {error}"))
        return
    connection.send((True, None))
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, call(function, given)))
        except Exception as error:  # So does the function.
            connection.send((False, f"{type(error).__name__}: {error}"))


def _leave_with(parent: int) -> None:
    """End this process when the one that started it is gone, whatever the function does."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

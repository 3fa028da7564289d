"""Reward function in a separate process, so that a hang or crash costs one answer and not the run.

``python -m recipes_lib.rl.reward_worker MODULE:FUNCTION FD`` serves calls over a socket, without importing torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import partial, wraps
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from recipes_lib.config.values import import_object, split_import_path
from recipes_lib.errors import UserError, escape_controls
from recipes_lib.processes import count_cores
from recipes_lib.stopping import STOP
from recipes_lib.training.guards.watchdog import WATCHDOG

_OF_TRL: Final = "trl.rewards"
_NEED_MATH_VERIFY: Final = ("accuracy_reward", "get_cosine_scaled_reward", "reasoning_accuracy_reward")
_NUM_WORKERS: Final = min(8, count_cores())
_RUNNER: Final = asyncio.Runner()
"""One event loop for all calls, because clients of functions (httpx, openai) keep connections that belong to theirs."""
_POLL_SECONDS: Final = 0.5
"""Time between two polls for a stop request while a process scores answers, in seconds."""
MAX_LIMITS: Final = 10
"""Time limit of scoring answers one by one, as a multiple of the limit of a call."""


def find_function(path: str) -> Callable[..., Any]:
    """Import ``package.module:function``, also from the working directory.

    ``package.module:factory(name=value, ...)`` calls a factory with constants. TRL's own reward functions expect chats,
    so an answer to a string prompt is passed to them as a chat of one message. Importing runs the user's code, which
    may raise any exception.

    Raises:
        ImportError: A package that the function needs is not installed.
        TypeError: The imported object is not callable.
        ValueError: As ``split_import_path``, as SyntaxError.
    """
    module_name, name, arguments = split_import_path(path)
    if module_name == _OF_TRL and name in _NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise ImportError("it needs math-verify: pip install 'recipes-lib[math]'")
    found: Callable[..., Any] = import_object(module_name, name)
    if arguments is not None:
        found = found(**arguments)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return _give_chats(found) if module_name == _OF_TRL else found


def _give_chats(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def ask(*, completions: Sequence[Any], **given: Any) -> Any:
        chats = [[{"role": "assistant", "content": text}] if isinstance(text, str) else text for text in completions]
        return function(completions=chats, **given)

    ask.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return ask


def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with keyword arguments, await what it returns if possible, and convert it to a list of numbers.

    Arrays, tensors, iterators such as generators, and numbers of their own types are converted.
    """
    result = function(**given)
    if inspect.isawaitable(result):
        result = _run(_wait_for(result))
    # By methods of arrays and tensors, because the worker imports neither numpy nor torch.
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, list | tuple | Iterator):
        return result
    return [one.item() if hasattr(one, "item") else float(one) if isinstance(one, Decimal) else one for one in result]


def _run(waiting: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _RUNNER.run(waiting)
    # A notebook runs an event loop in this thread, which can run no other beside it.
    with ThreadPoolExecutor(1) as other:
        return other.submit(_RUNNER.run, waiting).result()


async def _wait_for(result: Awaitable[Any]) -> Any:
    """Await any awaitable: a runner takes coroutines only."""
    return await result


def describe_error(function: Callable[..., Any], error: BaseException) -> str:
    """Return type and message of an error that a function raised, and the line of its file that led to it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename]
    return f"{type(error).__name__}: {error}" + "".join(f" ({last.filename}:{last.lineno})" for last in own[-1:])


class _LostError(Exception):
    """The function returned no result."""


_Request = tuple[int, Mapping[str, Any]]
"""Seed of a call, drawn from the global generator, which the run seeds before it scores; and its arguments."""


class IsolatedFunction:
    """Reward function with a time limit.

    One call scores all answers. If it fails, each answer is scored alone, by up to eight processes, for at most
    ``MAX_LIMITS`` times the limit of a call. Answers that fail again, or are not reached in that time, have the reward
    ``None``. If all of several answers fail, the call raises.

    Source: ``tests/rl/test_reward_worker.py``.
    """

    def __init__(self, path: str, seconds: float, function: Callable[..., Any] | None = None) -> None:
        """Start no process; the first call does.

        Args:
            path: Import path of the function, as for ``find_function``.
            seconds: Time limit of a call.
            function: The function, of which only the signature is kept, for ``verify_arguments``.
        """
        with suppress(TypeError, ValueError):  # Without a function, or of one in C.
            self.__signature__ = inspect.signature(function, follow_wrapped=False)  # type: ignore[arg-type]
        self._path, self._seconds = path, seconds
        # Each thread has a process of its own; a call gets an idle thread before another is started.
        self._threads, self._own = ThreadPoolExecutor(_NUM_WORKERS), threading.local()

    def __call__(self, **given: Sequence[Any]) -> Any:
        """Score answers; arguments are lists with one element per answer.

        Raises:
            RuntimeError: All of several answers failed.
            StopPendingError: There is a stop request during training.
            UserError: The function raised it: other answers would fail as well.
        """
        with suppress(_LostError):
            # One call for all answers, because some functions compare them or batch a model.
            return self._threads.submit(self._ask, (random.getrandbits(32), given)).result()
        rows = range(len(given["completions"]))
        alone = [(random.getrandbits(32), {name: [column[row]] for name, column in given.items()}) for row in rows]
        found = list(self._threads.map(partial(self._ask_before, time.monotonic() + MAX_LIMITS * self._seconds), alone))
        lost = [error for error in found if isinstance(error, _LostError)]
        if len(lost) == len(found) > 1:
            raise RuntimeError(str(lost[0]))
        if lost:
            warning = f"warning: {self._path} gave {len(lost)} of {len(found)} answers no score: {lost[0]}"
            sys.stderr.write(f"{escape_controls(warning)}\n")
        return [score for scores in found for score in ([None] if isinstance(scores, _LostError) else scores)]

    def _ask(self, request: _Request) -> Any:
        """Return the function's result, from the process of this thread."""
        if not hasattr(self._own, "worker"):
            self._own.worker = _Worker(self._path, self._seconds)
        return self._own.worker.ask(request)

    def _ask_before(self, end: float, request: _Request) -> Any:
        """Return the function's result for an answer, or the error of its failure; the latter after ``end``."""
        try:
            if time.monotonic() > end:
                raise _LostError(f"others took {MAX_LIMITS} times the {self._seconds:g} s of a call")
            return self._ask(request)
        except _LostError as error:
            return error
        finally:
            WATCHDOG.beat()


class _Worker:
    """One process that runs a function; started by the first call, and again after a failure."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def ask(self, request: _Request) -> Any:
        """Return the function's result for some answers.

        Raises:
            StopPendingError: There is a stop request during training.
            UserError: The function raised it, as a judge does without its endpoint.
            _LostError: The function raised or exceeded the time limit, or its process ended.
        """
        try:
            if self._process is None:
                self._start()
            self._connection.send(request)
            is_done, result = self._receive(self._seconds)
        except (EOFError, OSError) as error:
            raise _LostError(self._end(error)) from error
        if isinstance(result, UserError):
            raise result
        if not is_done:
            raise _LostError(result)
        return result

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        end = theirs.fileno()
        command = [sys.executable, "-P", "-m", __name__, self._path, str(end)]
        # Without standard input, so that the function cannot block on the terminal; in a group of its own with all that
        # the function starts, which Ctrl-C in the terminal does not reach.
        self._process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL, start_new_session=True)
        # If this process kept it open, reading would not end with EOFError when the worker dies.
        theirs.close()
        # Called by ``_end``, when this object is collected, or at interpreter exit; never twice, as ids are reused.
        self._kill = weakref.finalize(self, _kill_group, self._process.pid)
        is_done, reason = self._receive(300.0)  # Importing may load a model.
        if not is_done:
            raise ChildProcessError(reason)

    def _receive(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while not self._connection.poll(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
            # Of the run, which waits for this thread: the limit may be longer than the grace time.
            STOP.raise_if_pending()
            if time.monotonic() >= end:
                raise TimeoutError(f"it took more than {seconds:g} s")
        return self._connection.recv()

    def _end(self, error: Exception) -> str:
        """End the process, and return the reason of its failure; the next call starts another."""
        if self._process is None:
            return f"its process did not start: {error}"
        self._kill()
        self._connection.close()
        code, self._process = self._process.wait(), None
        return str(error) if isinstance(error, TimeoutError | ChildProcessError) else f"its process ended with {code}"


def main(path: str, descriptor: int) -> None:
    """Serve calls until the socket closes."""
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
            seed, given = connection.recv()
        except EOFError:
            return
        try:
            _seed(seed)
            connection.send((True, call(function, given)))
        except UserError as error:
            connection.send((False, error))
        except (Exception, SystemExit) as error:  # The function is the user's; an unpicklable result is reported, too.
            connection.send((False, describe_error(function, error)))


def _seed(seed: int) -> None:
    """Seed the global generators of the libraries that are imported, as transformers' ``set_seed`` does in a run."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _leave_with(parent: int) -> None:
    """End this process and those that the function started when the parent ends, even while the function runs."""
    while os.getppid() == parent:
        time.sleep(5.0)
    _kill_group(os.getpgrp())


def _kill_group(group: int) -> None:
    with suppress(OSError):  # On macOS, a group whose processes have all ended cannot be signalled.
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Preemption: stop requests by a signal, a file, or the end of the launcher. Standard library only.

While there is nothing to save, a signal handler raises ``PreemptedError`` in the main thread, which unwinds as Ctrl-C
does. Inside ``deferred`` it only records the request, and the training loop polls it between steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from recipes_lib import processes
from recipes_lib.errors import EXIT_BUG, EXIT_PREEMPTED, LostPeerError, PreemptedError

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

SECONDS_OF_ONE_REQUEST: Final = 1.0
"""Signals within this time are one request: a scheduler signals every process, and a launcher forwards it again."""

_SECONDS_TO_UNWIND: Final = 5.0

_SECONDS_TO_LEAVE: Final = 10.0
"""Within which a process that has nothing to save is gone, and again one that is ending: it may wait in C for others
that have left."""


class StopRequest:
    """The stop request of this process, and its signal handlers.

    Attributes:
        reason: What requested the stop first, such as ``SIGTERM``; ``None``: nothing.
        is_deferred: Whether a request is only recorded.
    """

    def __init__(self) -> None:
        """Create an empty request; signal handlers are not installed yet."""
        self.reason: str | None = None
        self._parent = os.getppid()
        self._is_installed = self.is_deferred = self._is_closed = self._has_raised = False

    def install(self) -> None:
        """Install the signal handlers; does nothing outside the main thread."""
        if self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed = True
        readable, writable = os.pipe()
        # A handler must never wait for a pipe that is full.
        os.set_blocking(writable, False)
        # Not by the handlers alone: Python runs them when the main thread comes back from C, which may be never.
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(readable,), name="stop signals", daemon=True).start()
        for number in STOP_SIGNALS:
            # Under nohup a closed terminal is no request.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def ask(self, reason: str) -> None:
        """Record a stop request; the first reason is kept."""
        self.reason = self.reason or reason

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record requests in this block; one that was not polled is raised at its end.

        Raises:
            PreemptedError: The block ended by itself, and a stop was asked for.
        """
        self.is_deferred = True
        try:
            yield
        # An error of the block itself takes precedence over a request that came meanwhile.
        finally:
            self.is_deferred = False
        if self.reason is not None:
            raise self._stop_here()

    def close(self) -> None:
        """Ignore further signals: this process is ending."""
        self._is_closed = True
        if self._is_installed and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # Python gives up handlers before it has ended, and what is ignored stays so.
                signal.signal(number, signal.SIG_IGN)

    def launcher_is_gone(self) -> bool:
        """Whether the launcher of this process has ended before it."""
        # Orphans are adopted by init or a subreaper: the parent's id changes.
        return processes.has_launcher() and os.getppid() != self._parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed or self._has_raised:
            return
        # A launcher ends all processes when one of them has failed; that is no request to be started again.
        if (lost := processes.find_lost()) is not None:
            self._has_raised = True
            raise LostPeerError(lost)
        self.ask(signal.Signals(number).name)
        if not self.is_deferred:
            raise self._stop_here()

    def _stop_here(self) -> PreemptedError:
        self._has_raised = True
        return PreemptedError(f"{self.reason}: stopped where there was nothing to save; run the same command to resume")

    def _watch(self, descriptor: int) -> None:
        """Exit at once on a second request, or when the main thread is blocked waiting for a rank that has died."""
        first: float | None = None
        while True:
            for number in os.read(descriptor, 64):
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if first is None:
                    first = now
                    self._leave_without_peer()
                    _start_timer(_SECONDS_TO_LEAVE, self._leave_in_time)
                elif now - first >= SECONDS_OF_ONE_REQUEST and not self._is_closed:
                    _leave(128 + number, f"{signal.Signals(number).name} again: left at once")

    def _leave_without_peer(self) -> None:
        if (lost := processes.find_lost()) is not None:
            _start_timer(_SECONDS_TO_UNWIND, _leave, EXIT_BUG, f"left because {lost}")

    def _leave_in_time(self, *, is_last: bool = False) -> None:
        """Exit if the main thread has not reacted in time, unless there is something to save."""
        if self.is_deferred:
            return
        # A process that is ending gets the time once more, and no third time.
        if self._is_closed and not is_last:
            _start_timer(_SECONDS_TO_LEAVE, lambda: self._leave_in_time(is_last=True))
        else:
            _leave(EXIT_PREEMPTED, f"{self.reason or 'stop request'}: left at once, with nothing to save")

    def _leave_to_parent(self) -> None:
        """In a forked child, such as a data loader worker: only the parent ends it.

        What is sent to the whole process group would otherwise kill the workers of a process that is still saving, and
        reach it once more from each of them.
        """
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if sys.platform != "darwin":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    """End when the parent sends SIGTERM, or when the parent has died."""
    if sys.platform != "darwin":
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in (os.getppid(), 0):
            pass
        os._exit(0)


def _start_timer(seconds: float, act: Callable[..., None], *args: object) -> None:
    timer = threading.Timer(seconds, act, args)
    timer.daemon = True
    timer.start()


def _leave(code: int, words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
    os._exit(code)


STOP: Final = StopRequest()
"""The stop request of this process; global because signals are sent to processes."""

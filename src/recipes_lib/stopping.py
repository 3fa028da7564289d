"""Preemption: stop requests by a signal, a file, or the end of the launcher. Standard library only.

Outside ``deferred`` there is nothing to save: the signal handler raises ``PreemptedError`` in the main thread, as
Ctrl-C raises ``KeyboardInterrupt``. Inside ``deferred`` it only records the request, and the training loop polls it
between steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import queues
from types import FrameType
from typing import Final

from recipes_lib import processes
from recipes_lib.errors import EXIT_BUG, EXIT_PREEMPTED, LostPeerError, PreemptedError, explain_refusal

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

SECONDS_OF_ONE_REQUEST: Final = 1.0
"""Signals within this time count as one request: a scheduler signals every process, and a launcher forwards it too."""

SECONDS_TO_UNWIND: Final = 5.0
"""Time for the main thread to exit after another rank has died; it may block in a collective operation."""

_SECONDS_TO_LEAVE: Final = 10.0
"""Time for a process without anything to save to exit, and once more for one that is already ending: its main thread
may block in C, waiting for ranks that have exited."""


class StopPendingError(Exception):
    """Ends a computation without collectives on this process; the ranks agree to stop at the next collective point."""


class StopRequest:
    """The stop request of this process, and its signal handlers.

    Attributes:
        reason: First reason to stop, such as ``SIGTERM``; ``None`` if there is no request.
        is_deferred: Whether requests are only recorded, not raised.
        is_reported: Whether ``run_command`` prints what is raised. It does not during the imports of a recipe, between
            ``install`` and ``run_command``: Python ends without a message after a ``SystemExit`` with a code.
    """

    def __init__(self) -> None:
        """Create the state without a request; ``install`` sets the signal handlers."""
        self.reason: str | None
        self.reset()
        self._parent = os.getppid()
        self.is_deferred = self.is_reported = self._is_installed = False

    def reset(self) -> None:
        """Forget an earlier run of this process, whose stop request and end do not concern the next one."""
        self.reason, self._is_closed, self._has_raised = None, False, False
        self._first_signal: float | None = None  # Its time; those of an earlier run do not make the next one a second.

    def install(self) -> None:
        """Forget an earlier run, and install the signal handlers, but not in other threads or interactive sessions."""
        self.reset()
        # `%run` of a recipe: the handlers, and the end of a process that does not react to one, outlive it.
        is_session = hasattr(sys, "ps1")
        if self._is_installed or is_session or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed, self.is_reported = True, False
        readable, writable = os.pipe()
        # A handler must never block on a full pipe.
        os.set_blocking(writable, False)
        # Python runs handlers only when the main thread returns from C, which may be never; the wakeup descriptor is
        # written at once, and a thread reads it.
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(readable,), name="stop signals", daemon=True).start()
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP, and so must the run.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def request(self, reason: str) -> None:
        """Record a stop request; only the first reason is kept."""
        self.reason = self.reason or reason

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record requests during the block; a pending one is raised after it.

        Raises:
            PreemptedError: The block succeeded, and there is a stop request.
            KeyboardInterrupt: Without installed handlers, Ctrl-C was pressed again after a request.
        """
        self.is_deferred = True
        # In a script or notebook that calls `train`, it is Python's own.
        is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if handles := is_plain and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        # `finally`: an error of the block propagates, and takes precedence over a pending request.
        finally:
            self.is_deferred = False
            if handles:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.reason is not None:
            raise self._stop_here()

    def raise_if_pending(self) -> None:
        """Raise on a request inside ``deferred``, for waits that may be longer than the grace time.

        Raises:
            StopPendingError: A request is deferred, and the handler must agree with the other processes next, as they
                do when they have finished; or this process is ending, and would wait for this thread.
        """
        if self._is_closed or (self.is_deferred and self.reason is not None):
            raise StopPendingError

    def close(self) -> None:
        """Ignore further stop signals: this process is ending."""
        self._is_closed = True
        if self._is_installed and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # Python restores the default action, which kills, for its handlers at shutdown, but not for SIG_IGN.
                signal.signal(number, signal.SIG_IGN)

    def launcher_is_gone(self) -> bool:
        """Return whether the launcher has ended before this process."""
        # An orphan is adopted by init or a subreaper, so its parent id changes.
        return processes.has_launcher() and os.getppid() != self._parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed or self._has_raised:
            return
        # A launcher sends SIGTERM to all processes when one has failed: that is a failure, not a preemption.
        if (lost := processes.find_dead_process()) is not None:
            self._has_raised = True
            raise LostPeerError(lost)
        self.request(signal.Signals(number).name)
        if not self.is_deferred:
            stop = self._stop_here()
            if not self.is_reported:  # What `run_command` does, also on a rank that is stopped alone.
                if processes.is_first_to_report(str(stop)):
                    sys.stderr.write(f"{stop}\n")
                processes.record_failure(stop, EXIT_PREEMPTED)
                processes.unregister_process()
                self.close()  # A launcher and a scheduler both signal, and Python's exit restores the default action.
            raise stop

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def _stop_here(self) -> PreemptedError:
        self._has_raised = True
        return PreemptedError(f"{self.reason}: stopped with nothing to save; run the same command to resume")

    def _watch(self, descriptor: int) -> None:
        """Exit immediately on a second request, or if the main thread blocks because another rank has died."""
        while True:
            for number in os.read(descriptor, 64):
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if (first := self._first_signal) is None:
                    self._first_signal = now
                    self._leave_without_peer()
                    _start_timer(_SECONDS_TO_LEAVE, self._leave_in_time, now)
                elif now - first >= SECONDS_OF_ONE_REQUEST and not self._is_closed:
                    leave(128 + number, f"{signal.Signals(number).name} again: exits immediately")

    def _leave_without_peer(self) -> None:
        if (lost := processes.find_dead_process()) is not None:
            _start_timer(SECONDS_TO_UNWIND, leave, EXIT_BUG, f"exits because {lost}")

    def _leave_in_time(self, signalled: float) -> None:
        """Exit if the main thread has not reacted in time, unless requests are deferred, or the run has ended."""
        if self._is_closed and not self.is_deferred:
            time.sleep(_SECONDS_TO_LEAVE)  # In a thread of its own: a process that is already ending gets more time.
        if not self.is_deferred and self._first_signal == signalled:
            leave(EXIT_PREEMPTED, f"{self.reason or 'stop request'}: exits immediately, with nothing to save")

    def _leave_to_parent(self) -> None:
        """Reset the handlers in a forked child, such as a data loader worker, so that only its parent ends it.

        Otherwise a signal to the whole process group would kill the workers of a process that is still saving, and each
        worker would write the signal to the inherited wakeup pipe again.
        """
        queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if sys.platform != "darwin":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey_parent, daemon=True).start()


@contextmanager
def raising_stop_signals() -> Iterator[None]:
    """Let stop signals raise in the block, as Ctrl-C does: their default action ends a process without a message.

    Does nothing in one of several processes, outside the main thread, and for signals that are handled, as in a run,
    or ignored, as under ``nohup``.

    Raises:
        PreemptedError: A stop signal was received.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise PreemptedError(f"{signal.Signals(number).name}: run the same command again")

    # A launcher sends SIGTERM to its processes when one has failed, and reports that itself.
    is_alone = processes.read_world_size() == 1 and threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOP_SIGNALS if is_alone and signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end_worker(error: BaseException, item: object) -> None:
    """End a process whose queue cannot send an item, as with a full ``/dev/shm``: its receiver would wait forever."""
    leave(EXIT_BUG, f"a worker process ends: {explain_refusal(error) or repr(error)}")


def _obey_parent() -> None:
    """Exit when the parent sends SIGTERM (signals of other processes are ignored), or the kernel does."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in (os.getppid(), 0):
        pass
    os._exit(0)


def _start_timer(seconds: float, act: Callable[..., None], *args: object) -> None:
    timer = threading.Timer(seconds, act, args)
    timer.daemon = True
    timer.start()


def leave(code: int, words: str) -> None:
    """Exit immediately, from any thread, with a line on standard error."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
    os._exit(code)


STOP: Final = StopRequest()
"""The stop request of this process; global because signals are sent to processes."""

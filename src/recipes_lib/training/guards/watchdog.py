"""Watchdog: dumps the stacks of a process without progress, and ends it later."""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from recipes_lib.errors import EXIT_STALLED
from recipes_lib.processes import read_rank, record_failure
from recipes_lib.stopping import STOP, StopRequest

STOP_FILE: Final = "STOP"
"""File in ``output_dir`` that requests a stop, as SIGTERM does; the run deletes it."""

SHOW_AFTER_SECONDS: Final = 600.0
"""Seconds without progress after which the stacks of all threads are written to stderr."""
END_AFTER_SECONDS: Final = 1800.0
"""Seconds without progress after which the process exits; transformers' default ``ddp_timeout``."""
SHOW_AFTER_STEPS: Final = 7
END_AFTER_STEPS: Final = 20
"""Both limits are at least this many times the median step time."""
PATIENCE: Final = 4.0
"""Factor on these limits in phases that do not report progress."""

REPORTING_PHASES: Final = frozenset({"a step", "an evaluation", "sampling answers", "computing log-probabilities"})
"""Phases that report progress. User functions, as in ``scoring answers`` and ``computing metrics``, cannot."""

_TICK_SECONDS: Final = 1.0
_SUSPENDED_SECONDS: Final = 60.0
_SECONDS_TO_RECORD: Final = 10.0
_NUM_STEPS_KEPT: Final = 101


class Watchdog:
    """Tracks the time since the last progress, and compares it with limits from the run's own step times.

    Attributes:
        on_stall: Callback with the reason, called before a stalled process exits.
        phase: Description of the present phase, for messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Initialise without watching.

        Args:
            clock: Monotonic clock in seconds.
        """
        self.on_stall: Callable[[str], None] = lambda _: None
        self._clock = clock
        self._last_poll = clock()
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS_KEPT)
        self.enter("starting")

    def begin(self) -> None:
        """Reset the step times of an earlier training."""
        self._steps.clear()
        self.enter("the first step")

    def enter(self, phase: str) -> None:
        """Enter a phase, which counts as progress.

        Args:
            phase: Description of the phase; limits are ``PATIENCE`` times longer outside of ``REPORTING_PHASES``.
        """
        self.phase, self._last_sign, self._is_shown = phase, self._clock(), False
        self._began = self._last_sign

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase for the block, and afterwards the previous one again."""
        previous = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)

    def finish_step(self) -> None:
        """Record the time of the present step, and enter the phase of logging, evaluation, saving and data loading."""
        if self.phase == "a step":
            self._steps.append(self._clock() - self._began)
        self.enter("the work between two steps")

    def beat(self) -> None:
        """Report progress in the present phase."""
        self._last_sign, self._is_shown = self._clock(), False

    def limits(self) -> tuple[float, float]:
        """Return the seconds without progress after which stacks are shown, and after which the process exits."""
        step = statistics.median(self._steps) if self._steps else 0.0
        patience = 1.0 if self.phase in REPORTING_PHASES else PATIENCE
        show_after, end_after = SHOW_AFTER_STEPS * step, END_AFTER_STEPS * step
        return patience * max(SHOW_AFTER_SECONDS, show_after), patience * max(END_AFTER_SECONDS, end_after)

    def poll(self) -> str | None:
        """Return the action that is due: ``show``, once per silence, or ``end``; ``None`` if neither is."""
        now = self._clock()
        # Polls are late if this process was suspended, by SIGSTOP or a scheduler: it could not make progress either.
        if now - self._last_poll > _SUSPENDED_SECONDS:
            self.beat()
        self._last_poll = now
        silence = now - self._last_sign
        show_after, end_after = self.limits()
        if silence >= end_after:
            return "end"
        if silence >= show_after and not self._is_shown:
            self._is_shown = True
            return "show"
        return None

    def describe(self) -> str:
        """Return a sentence with rank, phase and seconds without progress."""
        seconds = self._clock() - self._last_sign
        return f"rank {read_rank()}: no progress in {self.phase} for {seconds:.0f} seconds"

    @contextmanager
    def watching(self, output_dir: Path, *, is_main: bool, stop: StopRequest = STOP) -> Iterator[None]:
        """Run the watchdog in background threads, which also poll for the stop file and for the launcher's end.

        Args:
            output_dir: Folder of the stop file.
            is_main: Whether this process polls for the stop file.
            stop: Receiver of stop requests.
        """
        self.begin()
        file, over = output_dir / STOP_FILE, threading.Event()

        def look_for_file() -> None:
            if file.is_file():
                stop.request(f"the file {file}")
                file.unlink(missing_ok=True)

        def look_for_launcher() -> None:
            if stop.launcher_is_gone():
                stop.request("the launcher is gone")

        # A separate thread for the file: a hanging disk must not stop the watchdog itself.
        polls = [[self._act, look_for_launcher], *([[look_for_file]] if is_main else [])]
        for functions in polls:
            threading.Thread(target=_repeat, args=(functions, over), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _act(self) -> None:
        action = self.poll()
        if action is None:
            return
        message = self.describe()
        if action == "show":
            sys.stderr.write(f"{message}; the stacks of its threads:\n")
            # faulthandler needs a file descriptor, which a replaced ``sys.stderr`` may not have.
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            return
        # The record is written to the disk, which may be what hangs: exit after a limited time in any case.
        threading.Timer(_SECONDS_TO_RECORD, os._exit, (EXIT_STALLED,)).start()
        with suppress(OSError):  # The terminal or pipe of stderr may be gone.
            sys.stderr.write(f"{message}: ended; its stacks are shown above; run the same command to resume\n")
            sys.stderr.flush()
        with suppress(OSError):
            record_failure(TimeoutError(message), EXIT_STALLED)
            self.on_stall(message)
        # Not ``sys.exit``: it ends this thread only, while the main thread hangs in native code.
        os._exit(EXIT_STALLED)


def _repeat(functions: Sequence[Callable[[], None]], over: threading.Event) -> None:
    while not over.wait(_TICK_SECONDS):
        for function in functions:
            with suppress(OSError):
                function()


WATCHDOG: Final = Watchdog()
"""Watchdog of this process."""

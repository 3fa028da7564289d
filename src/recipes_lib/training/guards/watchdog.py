"""The watchdog: a hanging run reports its threads and ends."""

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
"""Put into ``output_dir``, it asks the run to stop as a signal does; the run takes it away."""

SHOW_AFTER_SECONDS: Final = 600.0
"""Without a sign of progress for so long, the stacks are shown."""
END_AFTER_SECONDS: Final = 1800.0
"""For so long, the process ends. As long as upstream's limit of a collective operation."""
STEPS: Final = 20
"""Never before the time of so many median steps, though, and shown not before a third of it."""
PATIENCE: Final = 4.0
"""Factor on all of that where nothing tells of progress: first step (compilation), loading, saving."""

TELLING: Final = frozenset({"a step", "an evaluation", "sampling answers", "reading answers"})
"""Phases that tell of their progress."""

_TICK_SECONDS: Final = 1.0
_SECONDS_TO_RECORD: Final = 10.0
_NUM_STEPS_KEPT: Final = 101


class Watchdog:
    """Knows when there was progress last, and what is too long.

    Attributes:
        on_stall: Called with the reason before a stalled process ends.
        phase: What the process is doing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is watched yet; ``clock`` gives seconds from any origin."""
        self.on_stall: Callable[[str], None] = lambda _: None
        self.phase = "starting"
        self._clock = clock
        self._began = self._last_sign = self._clock()
        self._is_shown = False
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS_KEPT)

    def begin(self) -> None:
        """Forget the steps of an earlier training."""
        self._steps.clear()
        self.enter("the first step")

    def enter(self, phase: str) -> None:
        """Something else begins: that is progress too.

        Args:
            phase: One of ``TELLING``; anything else is given more time.
        """
        self.phase, self._last_sign, self._is_shown = phase, self._clock(), False
        self._began = self._last_sign

    def finish_step(self) -> None:
        """The step that was entered is done; logging, evaluation, saving or new data follow."""
        if self.phase == "a step":
            self._steps.append(self._clock() - self._began)
        self.enter("what is between two steps")

    def beat(self) -> None:
        """There was progress in the phase that is on."""
        self._last_sign, self._is_shown = self._clock(), False

    def limits(self) -> tuple[float, float]:
        """Return after how many seconds without progress the stacks are shown, and after how many the process ends."""
        steps = STEPS * statistics.median(self._steps) if self._steps else 0.0
        patience = 1.0 if self.phase in TELLING else PATIENCE
        return patience * max(SHOW_AFTER_SECONDS, steps / 3), patience * max(END_AFTER_SECONDS, steps)

    def look(self) -> str | None:
        """Return ``show`` or ``end`` when that is due, ``show`` once; else ``None``."""
        silence = self._clock() - self._last_sign
        show_after, end_after = self.limits()
        if silence >= end_after:
            return "end"
        if silence >= show_after and not self._is_shown:
            self._is_shown = True
            return "show"
        return None

    def describe(self) -> str:
        """Return which process is silent, in what, and for how long."""
        seconds = self._clock() - self._last_sign
        return f"rank {read_rank()}: no progress in {self.phase} for {seconds:.0f} seconds"

    @contextmanager
    def watching(self, output_dir: Path, *, is_main: bool, stop: StopRequest = STOP) -> Iterator[None]:
        """Watch what happens in the block from threads, which also look for the touch-file and for the launcher.

        Args:
            output_dir: Where the touch-file would be.
            is_main: Whether this process looks for it.
            stop: Is told.
        """
        self.begin()
        file, over = output_dir / STOP_FILE, threading.Event()

        def look_for_file() -> None:
            if file.exists():
                stop.ask(f"the file {file}")
                # Last: a run that is killed before it has stopped finds the request again.
                file.unlink(missing_ok=True)

        def look_for_launcher() -> None:
            if stop.launcher_is_gone():
                stop.ask("the launcher is gone")

        # A thread each: the disk may be what hangs.
        looks = [[self._act, look_for_launcher], *([[look_for_file]] if is_main else [])]
        for some in looks:
            threading.Thread(target=_repeat, args=(some, over), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _act(self) -> None:
        verdict = self.look()
        if verdict is None:
            return
        words = self.describe()
        if verdict == "show":
            sys.stderr.write(f"{words}; where its threads stand:\n")
            # It writes to a descriptor, which a replaced ``sys.stderr`` may not have.
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            return
        sys.stderr.write(f"{words}: ended; what it hung in is shown above, and the same command resumes\n")
        sys.stderr.flush()
        # The record goes to a disk that may be what hangs.
        threading.Timer(_SECONDS_TO_RECORD, os._exit, (EXIT_STALLED,)).start()
        with suppress(OSError):
            record_failure(TimeoutError(words), is_unforeseen=False)
            self.on_stall(words)
        os._exit(EXIT_STALLED)


def _repeat(looks: Sequence[Callable[[], None]], over: threading.Event) -> None:
    while not over.wait(_TICK_SECONDS):
        for look in looks:
            with suppress(OSError):
                look()


WATCHDOG: Final = Watchdog()
"""Of this process."""

"""Processes of the stages that run at the same time: their output, their ends, and the signals that reach them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread
from typing import Final

from recipes_lib.errors import EXIT_DONE, EXIT_PREEMPTED, ConfigError, Problem, translate_exit_code

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_END: Final = b"\0end of the process\0\n"
"""Written to the labelled output of a process after its last line."""


class Children:
    """Processes that run at the same time and are waited for. Stop signals but Ctrl-C are forwarded to them as SIGTERM.

    Args:
        locks: Descriptors that they inherit.
        is_labelled: Whether their lines are printed after their names.

    Attributes:
        is_stopped: Whether there was a stop signal, or Ctrl-C, while one of them ran.
        is_interrupted: Whether it was Ctrl-C.
    """

    def __init__(self, locks: Sequence[int] = (), *, is_labelled: bool = False) -> None:
        self.is_stopped = self.is_interrupted = False
        self._locks, self._is_labelled = locks, is_labelled
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: SimpleQueue[str] = SimpleQueue()
        self._handlers = ExitStack()

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a command, with variables in addition to those of this process.

        Raises:
            ConfigError: The program does not exist or cannot be executed.
        """
        if missing := find_program(words):
            raise ConfigError(Problem(shlex.join(words), missing, "install it, or write its path"))
        sys.stdout.flush()
        # `env` adds the variables to the inherited ones, which this module need not read.
        variables = ["env", *(f"{key}={value}" for key, value in environment.items())] if environment else []
        source, sink = os.pipe() if self._is_labelled else (None, None)
        if not self._processes:
            self._forward_signals()
        try:
            process = subprocess.Popen([*variables, *words], stdout=sink, stderr=sink, pass_fds=self._locks)
        except (OSError, ValueError) as error:
            self._restore_handlers()
            reason = error.strerror if isinstance(error, OSError) else error
            found, remedy = f"cannot be started: {reason}", "name its interpreter: [bash, script.sh]"
            raise ConfigError(Problem(shlex.join(words), found, remedy)) from error
        self._processes[name] = process
        if self.is_stopped:  # A signal that came before there was a process to receive it.
            process.terminate()
        Thread(target=self._follow, args=(name, process, source, sink), daemon=True).start()

    def wait(self) -> tuple[str, int | None]:
        """Wait until one of the processes ends; return its name and exit code, ``None`` if it failed after Ctrl-C.

        The code of one that the forwarded SIGTERM ends is ``EXIT_PREEMPTED``.
        """
        name = self._ended.get()
        code = self._processes.pop(name).wait()
        self._restore_handlers()
        if self.is_interrupted and code != EXIT_DONE:
            return name, None
        if self.is_stopped and code == -signal.SIGTERM:  # A program without a handler.
            return name, EXIT_PREEMPTED
        return name, translate_exit_code(code)

    def _follow(self, name: str, process: subprocess.Popen[bytes], source: int | None, sink: int | None) -> None:
        # Python handles signals in the main thread, which they shall wake.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if source is not None:
            Thread(target=self._print_lines, args=(name, source)).start()  # A daemon, as this thread.
        process.wait()
        if sink is None:
            self._ended.put(name)
        else:
            # After all that it has written. Not the end of the file: a process that it leaves behind may keep it open.
            os.write(sink, _END)
            os.close(sink)

    def _print_lines(self, name: str, source: int) -> None:
        with open(source, "rb") as lines:
            for line in lines:
                if written := line.removesuffix(_END):
                    # Of a progress bar, the last state.
                    text = written.decode(errors="replace").rstrip().rpartition("\r")[2]
                    sys.stdout.write(f"{name} | {text}\n")
                    sys.stdout.flush()
                if line != written:
                    self._ended.put(name)

    def _forward_signals(self) -> None:
        # Before the start, so that a signal at any time ends the stage too. nohup ignores SIGHUP, and so must this.
        for number in _SIGNALS:
            if (before := signal.getsignal(number)) != signal.SIG_IGN:
                self._handlers.callback(signal.signal, number, before)
                signal.signal(number, self._stop)

    def _stop(self, number: int, _: object) -> None:
        self.is_stopped = True
        # A terminal sends SIGINT to all of its processes; other signals may reach this one alone.
        if number == signal.SIGINT:
            self.is_interrupted = True
            return
        for process in list(self._processes.values()):
            process.terminate()

    def _restore_handlers(self) -> None:
        if not self._processes:
            self._handlers.close()


def find_program(words: Sequence[str]) -> str | None:
    """Return why a command cannot be started; ``None`` if its program exists and is executable."""
    program = words[0] if words else ""
    return None if shutil.which(program) else f"there is no program {program!r}"

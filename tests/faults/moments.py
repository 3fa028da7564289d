"""Events of a run, identified by their number and never by a clock, and actions at one of them."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.forked import limit_forked
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Act = Callable[[], object]


class EventCounter:
    """Counts events across a fork, and calls a function at one of them.

    Attributes:
        number: Number of the event, from 1, at which the function is called; 0: never.
    """

    def __init__(self, number: int = 0, act: Act | None = None) -> None:
        """Start at 0."""
        self.number = number
        self._act = act
        self._shared = mmap.mmap(-1, 8)  # Shared memory: the child counts, the parent reads.

    @property
    def count(self) -> int:
        """Number of events so far."""
        return int.from_bytes(self._shared[:8], "little")

    @property
    def has_acted(self) -> bool:
        """Whether event ``number`` has occurred."""
        return 0 < self.number <= self.count

    def count_event(self, *_: Any) -> None:
        """Count an event."""
        count = self.count + 1
        self._shared[:8] = count.to_bytes(8, "little")
        if count == self.number and self._act is not None:
            self._act()


def kill_self() -> None:
    """Kill this process with SIGKILL, as the out-of-memory killer does: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(run: Act, module: Any, function: str, call: int) -> None:
    """Call ``run`` in a forked process, which is killed at a call of ``function``, counted from 1."""

    def count_and_run() -> None:
        limit_forked()
        original, events = getattr(module, function), EventCounter(call, kill_self)

        def counted(*args: Any, **kwargs: Any) -> Any:
            events.count_event()
            return original(*args, **kwargs)

        setattr(module, function, counted)
        run()

    process = multiprocessing.get_context("fork").Process(target=count_and_run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def send_sigterm() -> None:
    """Send SIGTERM to this process, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill_in_next_write_beyond(num_bytes: int) -> Act:
    """Return a function after which the kernel kills this process in a write beyond ``num_bytes`` of a file."""

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit_file_size


def count_training_events(events: EventCounter) -> None:
    """Count forward and backward passes of modules, and the beginning and end of every update."""

    def on_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        events.count_event()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(events.count_event)

    nn.modules.module.register_module_forward_hook(on_forward)
    register_optimizer_step_pre_hook(events.count_event)
    register_optimizer_step_post_hook(events.count_event)


def count_disk_events(events: EventCounter, folder: Path, since: str = "") -> None:
    """Count disk operations below a folder: open, create, rename, fsync, delete.

    Args:
        events: Counter.
        folder: Output directory of the run.
        since: Count from the first path on that contains this.
    """
    prefix, has_begun = str(folder), not since

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal has_begun
        if not args or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
        if isinstance(path, str) and path.startswith(prefix):
            has_begun = has_begun or since in path
            if has_begun:
                events.count_event()

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        if has_begun:
            events.count_event()
        fsync(descriptor)

    os.fsync = counted_fsync  # Python raises no audit event for it.
    sys.addaudithook(watch)


def make_nan(tensor: Tensor) -> Tensor:
    """Return a tensor of NaN of the same shape."""
    return torch.full_like(tensor, float("nan"))

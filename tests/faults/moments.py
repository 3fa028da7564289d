"""Moments of a run, told by what has been counted and never by a clock; and what happens at one."""

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
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Act = Callable[[], object]


class Moments:
    """Counts events across a fork, and acts at one of them.

    Attributes:
        number: At which event, from 1; at 0 they are only counted.
    """

    def __init__(self, number: int = 0, act: Act | None = None) -> None:
        """Nothing has happened yet."""
        self.number = number
        self._act = act
        self._shared = mmap.mmap(-1, 8)  # What the child counts, the parent reads.

    @property
    def count(self) -> int:
        """How many there were."""
        return int.from_bytes(self._shared[:8], "little")

    @property
    def was_met(self) -> bool:
        """Whether the moment came."""
        return 0 < self.number <= self.count

    def meet(self, *_: Any) -> None:
        """One more."""
        count = self.count + 1
        self._shared[:8] = count.to_bytes(8, "little")
        if count == self.number and self._act is not None:
            self._act()


def die() -> None:
    """End as by the out-of-memory killer or a power cut: nothing is unwound, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(run: Act, module: Any, function: str, call: int) -> None:
    """Run something in a forked process, which is killed at a call of a function, counted from 1."""

    def count_and_run() -> None:
        original, moments = getattr(module, function), Moments(call, die)

        def counted(*args: Any, **kwargs: Any) -> Any:
            moments.meet()
            return original(*args, **kwargs)

        setattr(module, function, counted)
        run()

    process = multiprocessing.get_context("fork").Process(target=count_and_run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def ask_to_stop() -> None:
    """Be asked to stop by a scheduler."""
    os.kill(os.getpid(), signal.SIGTERM)


def die_in_the_next_write_beyond(num_bytes: int) -> Act:
    """Return what ends the process in the middle of writing a file, when so many bytes of it are there."""

    def arrange() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return arrange


def watch_training(moments: Moments) -> None:
    """Count the layers computed forwards and backwards, and both sides of every update."""

    def computed(module: nn.Module, inputs: Any, output: Any) -> None:
        moments.meet()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(moments.meet)

    nn.modules.module.register_module_forward_hook(computed)
    register_optimizer_step_pre_hook(moments.meet)
    register_optimizer_step_post_hook(moments.meet)


def watch_disk(moments: Moments, folder: Path, since: str = "") -> None:
    """Count what happens below a folder: files opened, made, named, flushed and removed.

    Args:
        moments: Are told.
        folder: Of the run.
        since: Only from the first path on that has this in it.
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
                moments.meet()

    flush = os.fsync

    def flushing(descriptor: int) -> None:
        if has_begun:
            moments.meet()
        flush(descriptor)

    os.fsync = flushing  # It is the one that Python tells no auditor of.
    sys.addaudithook(watch)


def spoil(tensor: Tensor) -> Tensor:
    """Return the tensor as one that is no number."""
    return torch.full_like(tensor, float("nan"))

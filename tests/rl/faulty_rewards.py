"""Reward functions for a process of their own, which imports nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path


def length(*, completions, **_):
    """The length; what an answer says it should do besides, happens."""
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "raise":
            raise ValueError("no number")
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if text == "unspeakable":
            return [lambda: None]
    return [len(text) for text in completions]


def meet(*, completions, pipe, **_):
    """Fails on several answers; the answers ``r`` and ``w``, each alone, open both ends of a pipe."""
    (mode,) = completions
    with Path(pipe[0]).open(mode):
        return [1]


async def slowly(*, completions, **_):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def process(*, completions, **_):
    return [os.getpid()] * len(completions)

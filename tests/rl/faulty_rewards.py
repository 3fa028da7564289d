"""Reward functions with faults, imported by the worker process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from recipes_lib.errors import ConfigError, Problem


def length(*, completions, **_):
    """Return lengths; an answer that names a fault triggers it."""
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "raise":
            raise ValueError("no number")
        if text == "refuse":
            raise ConfigError(Problem("base_url", "had no answer", "start it"))
        if text == "exit":
            sys.exit(0)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "unpicklable":
            return [lambda: None]
    return [len(text) for text in completions]


def rendezvous(*, completions, pipe, **_):
    """Fail on several answers; ``r`` and ``w`` alone open the two ends of a pipe, which blocks until both do."""
    (mode,) = completions
    with Path(pipe[0]).open(mode):
        return [1]


async def score_async(*, completions, **_):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def start_program(*, pipe, **_):
    """Start a program that has the pipe open, and end."""
    subprocess.Popen(["sleep", "600"], stdout=os.open(pipe[0], os.O_WRONLY))
    os.kill(os.getpid(), signal.SIGKILL)


def report_group(**_):
    return [os.getpgrp()]


def report_pid(*, completions, **_):
    return [os.getpid()] * len(completions)


def draw(*, completions, **_):
    """Return random numbers of Python, NumPy and torch, for three answers."""
    import numpy
    import torch

    return [random.random(), numpy.random.rand(), float(torch.rand(()))]  # noqa: NPY002 (the global generator)

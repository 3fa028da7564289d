"""Metrics of a run: token counts, throughput, MFU, and ``metrics.jsonl`` with one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import atomic_file, parse_number, parse_record, spell_numbers
from recipes_lib.planning.compute import TokenFlops
from recipes_lib.training.collectives import sum_over_processes

METRICS_FILE = "metrics.jsonl"


class Counts(NamedTuple):
    """Token counts, by their names in a checkpoint.

    Attributes:
        num_tokens: Number of tokens without padding.
        num_targets: Number of target tokens.
        num_correct: Number of targets with the model's highest logit.
    """

    num_tokens: int = 0
    num_targets: int = 0
    num_correct: int = 0


class StepCounter:
    """Token counts of a run.

    Attributes:
        totals: Counts since the start of the run, over all processes as of the last ``synchronise``.
    """

    def __init__(self) -> None:
        self.totals = Counts()
        self._pending: list[int | Tensor] = [0, 0, 0]

    def add(self, num_tokens: int | Tensor, num_targets: int | Tensor, num_correct: int | Tensor = 0) -> None:
        """Count a batch of this process; scalar tensors stay on their device, without synchronisation."""
        counts = (num_tokens, num_targets, num_correct)
        self._pending = [before + count for before, count in zip(self._pending, counts, strict=True)]

    def synchronise(self, group: distributed.ProcessGroup | None = None) -> None:
        """Add the counts of all processes of ``group`` to the totals; collective."""
        counts = sum_over_processes(read_together(self._pending), group)
        self._pending = [0, 0, 0]
        self.totals = Counts(*(before + int(count) for before, count in zip(self.totals, counts, strict=True)))

    def restore(self, totals: Mapping[str, Any]) -> None:
        """Restore the totals of a checkpoint; a missing one is 0."""
        self._pending = [0, 0, 0]
        self.totals = Counts(*(totals.get(name, 0) for name in Counts._fields))


def read_together(scalars: Sequence[float | Tensor]) -> list[Any]:
    """Return the values of numbers and scalar tensors of one device, with a single device-to-host transfer."""
    # Double precision, which MPS lacks, is exact for counts up to 2^53; float32 only up to 2^24 tokens.
    tensors = (scalar.cpu() if scalar.is_mps else scalar for scalar in scalars if isinstance(scalar, Tensor))
    on_device = [tensor.double() for tensor in tensors]
    values = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(values) if isinstance(scalar, Tensor) else scalar for scalar in scalars]


class ThroughputMeter:
    """Tokens per second and model FLOPs utilisation (MFU) between two ``measure`` calls.

    ``stop`` and ``resume`` exclude evaluation, sampling and saving from the time; waiting for data is included.

    Attributes:
        seconds: Training time in seconds as of the last ``stop``, including that before a resumption.
        joules: Energy of this process's GPU during this time; 0 if it is not measured.
    """

    def __init__(
        self,
        counter: StepCounter,
        *,
        flops: TokenFlops | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a meter with a stopped clock.

        Args:
            counter: Token counter.
            flops: FLOPs per token; ``None``: ``mfu`` is null.
            peak_flops: Peak FLOP/s of all devices of the run together; ``None``: ``mfu`` is null.
            clock: Monotonic clock in seconds.
        """
        self._counter = counter
        self._flops = flops
        self._peak_flops = peak_flops
        self._clock = clock
        self._resumed_at: float | None
        self.begin()

    def begin(self, seconds: float = 0.0, joules: float = 0.0) -> None:
        """Start a window with the clock stopped at ``seconds``: 0, or time and energy of a checkpoint."""
        self.seconds, self.joules, self._resumed_at = seconds, joules, None
        self._window = (seconds, self._counter.totals)

    def stop(self) -> None:
        """Stop the clock."""
        if self._resumed_at is not None:
            self.seconds += self._clock() - self._resumed_at
            self.joules += read_energy() - self._joules_before
            self._resumed_at = None

    def resume(self) -> None:
        """Start the clock."""
        if self._resumed_at is None:
            self._resumed_at, self._joules_before = self._clock(), read_energy()

    def measure(self) -> dict[str, float | int | None]:
        """Return the metrics since the last call, by their names in ``metrics.jsonl``, and start a new window.

        The clock must be stopped and the counter synchronised. A rate is ``None`` if no time has passed.
        """
        assert self._resumed_at is None
        began, before = self._window
        totals, seconds = self._counter.totals, self.seconds - began
        num_tokens, num_targets, num_correct = (now - then for now, then in zip(totals, before, strict=True))
        self.begin(self.seconds, self.joules)
        mfu = None
        if self._flops and self._peak_flops and seconds:
            mfu = self._flops.total(num_tokens, num_targets) / (seconds * self._peak_flops)
        return {
            "token_accuracy": num_correct / num_targets if num_targets else None,
            "num_tokens": totals.num_tokens,
            "num_target_tokens": totals.num_targets,
            "tokens_per_second": num_tokens / seconds if seconds else None,
            "target_tokens_per_second": num_targets / seconds if seconds else None,
            "mfu": mfu,
            "num_flops": self._flops.total(totals.num_tokens, totals.num_targets) if self._flops else None,
            "memory_bytes": read_peak_memory(),
            "seconds": self.seconds,
            **({"energy_joules": self.joules} if self.joules else {}),
        }


def read_energy() -> float:
    """Return the energy that this process's GPU has used since its driver was loaded, in joules.

    It is 0 without a GPU, without the package ``nvidia-ml-py``, and on GPUs that do not measure it.
    """
    # A run on the CPU beside a GPU must not initialise CUDA.
    if not torch.cuda.is_initialized() or find_spec("pynvml") is None:  # type: ignore[no-untyped-call]
        return 0.0
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()  # Counts references; cheap after the first call.
        # By UUID: `CUDA_VISIBLE_DEVICES` renumbers the devices of torch, but not those of NVML.
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000)
    return 0.0


def read_peak_memory() -> int:
    """Return the peak memory of this process in bytes: allocated GPU memory, or resident set size on a CPU."""
    # 0 without a GPU, and in a run on the CPU of a machine with one.
    if peak := torch.cuda.max_memory_allocated():
        return peak
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_run(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``memory_bytes`` (peak), ``step_seconds`` (median) and the last ``eval_loss``, as far as logged.

    Args:
        events: Events in order; read once, and not kept.
    """
    measured, paces = dict[str, float](), list[float]()
    before: tuple[float, float] | None = None
    for event in events:
        if (loss := parse_number(event.get("eval_loss"))) is not None:
            measured["eval_loss"] = loss
        if event.get("kind") != "train":
            continue
        if size := parse_number(event.get("memory_bytes")):
            measured["memory_bytes"] = max(size, measured.get("memory_bytes", size))
        step, seconds = (parse_number(event.get(name)) for name in ("step", "seconds"))
        if step is not None and seconds is not None:
            if before and step > before[0]:
                paces.append((seconds - before[1]) / (step - before[0]))
            before = step, seconds
    return measured | ({"step_seconds": statistics.median(paces)} if paces else {})


class MetricsWriter:
    """Appends events to a JSON Lines file, such as ``metrics.jsonl``; a kill loses at most the line being written."""

    def __init__(self, path: Path, *, is_main: bool = True) -> None:
        """Write to ``path``; nothing is written unless ``is_main``.

        Raises:
            ConfigError: The path is that of a pipe.
        """
        if path.is_fifo():  # It would block until another process opens it or reads from it.
            raise ConfigError(Problem(str(path), "is a pipe, not a file", "move it away"))
        self._path = path
        self._is_main = is_main

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event as a line; NaN and infinities become the strings ``nan``, ``inf`` and ``-inf``.

        Args:
            event: JSON values with a ``step``.

        Raises:
            OSError: The file cannot be written; the error names it.
        """
        if not self._is_main:
            return
        line = (json.dumps(spell_numbers(event), allow_nan=False) + "\n").encode()
        try:
            # Opened for each event, so that lines are not written to a file that was renamed or deleted in the
            # meantime; for appending, so that a second writer cannot overwrite lines.
            with self._path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # Terminate a line that a kill truncated.
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        """Drop all events after ``step``, and truncated lines, before training resumes from there.

        At step 0 all events are dropped, including an evaluation before the first step, which is repeated.

        Args:
            step: Number of finished optimizer steps.
            is_evaluated: Whether to keep the evaluation of ``step`` (also lines without a ``kind``: samples); False if
                it will be repeated.
        """
        if not self._is_main or not self._path.exists():
            return
        # Line by line: the events of a million steps take a gigabyte.
        with atomic_file(self._path) as unfinished, self._path.open("rb") as old, unfinished.open("wb") as new:
            new.writelines(line for line in old if 0 < step >= _read_step(line, is_evaluated))


def _read_step(line: bytes, is_evaluated: bool) -> float:
    """Return the step of a line for ``rewind``; infinity for truncated lines, and for the ``best`` line of a run's end.

    Unless ``is_evaluated``, evaluations are placed half a step later, so that that of the last step is dropped.
    """
    event = parse_record(line.decode(errors="replace")) or {}
    step = parse_number(event.get("step"))
    if step is None or event.get("kind") == "best":
        return math.inf
    return step + (0.5 if event.get("kind", "eval") == "eval" and not is_evaluated else 0)

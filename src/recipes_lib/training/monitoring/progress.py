"""Progress display: a live bar on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from recipes_lib.quantities import format_count, format_duration

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 10.0
_FIGURES = (
    *(("loss", "loss {:.4g}"), ("objective/score", "score {:.4g}"), ("objective/kl_seq", "kl {:.4g}")),
    *(
        ("eval_loss", "held-out loss {:.4g}"),
        ("eval_bits_per_byte", "bits/byte {:.4g}"),
        ("eval_reward", "reward {:.4g}"),
    ),
    *(("learning_rate", "lr {:.2e}"), ("grad_norm", "grad {:.3g}")),
)
_SHARES = (
    *(("mfu", "mfu"), ("rewards/accuracies", "chosen wins"), ("eval_rewards/accuracies", "chosen wins")),
    *(("eval_token_accuracy", "accuracy"), ("eval_stop_rate", "stopped")),
)


class TrainingProgress:
    """Progress display of a run; this base class, for all processes except the main one, shows nothing.

    Methods may be called in any order, and ``stop`` several times.
    """

    def start(self, num_steps: int, step: int) -> None:
        """Start a training of ``num_steps`` optimizer steps, of which ``step`` are done."""

    def advance(self, step: int) -> None:
        """Set the number of finished optimizer steps."""

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event of ``metrics.jsonl``."""

    def say(self, line: str) -> None:
        """Print a message."""

    def track(self, items: Iterable[T], what: str, num_items: int) -> Iterator[T]:
        """Yield ``items`` and show how many of ``num_items`` are done, with the label ``what``."""
        yield from items

    def stop(self) -> None:
        """Close the display."""


def build_progress(*, is_main: bool, stream: TextIO | None = None) -> TrainingProgress:
    """Build the display for ``stream`` (default: stderr): live on a terminal, else lines; none unless ``is_main``."""
    stream = sys.stderr if stream is None else stream
    if not is_main:
        return TrainingProgress()
    # A replaced stream, such as one that also writes a log file, may only have `write` and `flush`; and without cursor
    # movement (`TERM=dumb`) rich draws the bar once, at the end.
    is_terminal = hasattr(stream, "isatty") and stream.isatty() and Console(file=stream).is_interactive
    return LiveProgress(stream) if is_terminal else PlainProgress(stream)


def describe_event(event: Mapping[str, Any]) -> str:
    """Return a short description of an event: ``loss 2.314  lr 3.0e-04  grad 0.82  12.3k target tok/s  mfu 41.2 %``."""
    shown = [template.format(event[name]) for name, template in _FIGURES if _is_number(event.get(name))]
    # Target tokens per second, or else tokens per second: reward models have no target tokens.
    rates = [
        f"{format_count(event[name])} {label}"
        for name, label in (("target_tokens_per_second", "target tok/s"), ("tokens_per_second", "tok/s"))
        if _is_number(event.get(name)) and event[name] > 0
    ]
    shares = [f"{label} {100 * event[name]:.3g} %" for name, label in _SHARES if _is_number(event.get(name))]
    return "  ".join([*shown, *rates[:1], *shares])


class PlainProgress(TrainingProgress):
    """Writes a line per logged step, at most one in ten seconds, and for every evaluation and the last step."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to ``stream``; ``clock`` is a monotonic clock in seconds."""
        self._stream = stream
        self._clock = clock
        self.start(num_steps=0, step=0)

    def start(self, num_steps: int, step: int) -> None:
        """Store time and step of the start, from which the remaining time is estimated."""
        self._num_steps = num_steps
        self._started = (self._clock(), step)
        self._last_line = self._clock() - SECONDS_BETWEEN_LINES

    def show(self, event: Mapping[str, Any]) -> None:
        """Write the event, unless a line was written in the last ten seconds."""
        step, now = event["step"], self._clock()
        if event["kind"] == "train" and step < self._num_steps and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        if event["kind"] == "train":
            self._last_line = now
        began, first_step = self._started
        parts = [f"step {step}/{self._num_steps}", describe_event(event)]
        if event["kind"] == "train" and first_step < step < self._num_steps:
            parts.append(f"eta {format_duration((now - began) / (step - first_step) * (self._num_steps - step))}")
        self.say("  ".join(parts))

    def track(self, items: Iterable[T], what: str, num_items: int) -> Iterator[T]:
        """Yield ``items``, with a line every ten seconds."""
        last_line = self._clock()
        for done, item in enumerate(items):
            if self._clock() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = self._clock()
                self.say(f"{what}  {done}/{num_items}")
            yield item

    def say(self, line: str) -> None:
        """Write the line."""
        # A run must outlive its terminal or pipe, as after `| head`; metrics.jsonl has the same figures.
        with suppress(OSError):
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveProgress(TrainingProgress):
    """Shows a bar with the latest metrics and the remaining time, and a second bar during an evaluation."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on ``stream``, a terminal."""
        self._console = Console(file=stream)
        # On 80 columns the metrics wrap; rich would cut off steps and remaining time.
        whole = Column(no_wrap=True)
        self._display = Progress(
            # No markup: names of data and metrics may contain brackets.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=whole),
            TextColumn("{task.fields[figures]}", style="cyan", markup=False, table_column=Column()),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True, table_column=whole),
            console=self._console,
        )
        self._training: TaskID | None = None

    def start(self, num_steps: int, step: int) -> None:
        """Draw the bar; after a rollback it replaces the previous one."""
        if self._training is not None:
            self._display.remove_task(self._training)
        self._training = self._display.add_task("train", total=num_steps, completed=step, figures="")
        self._display.start()

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._training is not None:
            self._display.update(self._training, completed=step)

    def show(self, event: Mapping[str, Any]) -> None:
        """Show the metrics of a training event next to the bar, and those of an evaluation as a line above it."""
        if event["kind"] == "train" and self._training is not None:
            self._display.update(self._training, figures=describe_event(event))
        else:
            self.say(f"step {event['step']}  {describe_event(event)}")

    def say(self, line: str) -> None:
        """Write the line above the bar."""
        self._console.print(line, highlight=False, markup=False)

    def track(self, items: Iterable[T], what: str, num_items: int) -> Iterator[T]:
        """Yield ``items`` with a bar that is removed afterwards."""
        task = self._display.add_task(what, total=num_items, figures="")
        try:
            for item in items:
                yield item
                self._display.advance(task)
        finally:
            self._display.remove_task(task)

    def stop(self) -> None:
        """Stop updating; the last state of the bar stays on the terminal."""
        self._display.stop()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)

"""Progress display: a live bar on a terminal, a plain line at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

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
    """The progress display of a run; this base class, for all processes except the main one, shows nothing.

    Every method may be called at any time, ``stop`` more than once.
    """

    def start(self, num_steps: int, step: int) -> None:
        """Training of ``num_steps`` optimizer steps begins after ``step`` of them."""

    def advance(self, step: int) -> None:
        """``step`` optimizer steps are done."""

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event of ``metrics.jsonl``."""

    def say(self, line: str) -> None:
        """Print a line that is neither a metric nor an error."""

    def track(self, items: Iterable[T], what: str, num_items: int) -> Iterator[T]:
        """Yield ``items`` and show how many of ``num_items`` are done; ``what`` names the work."""
        yield from items

    def stop(self) -> None:
        """Close the display."""


def build_progress(*, is_main: bool, stream: TextIO | None = None) -> TrainingProgress:
    """Build the display for ``stream`` (default: stderr): live on a terminal, lines elsewhere, none unless main."""
    stream = sys.stderr if stream is None else stream
    if not is_main:
        return TrainingProgress()
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


def describe_event(event: Mapping[str, Any]) -> str:
    """Return an event in a few words: ``loss 2.314  lr 3.0e-04  grad 0.82  12.3k target tok/s  mfu 41 %``."""
    shown = [template.format(event[name]) for name, template in _FIGURES if _is_number(event.get(name))]
    # A reward model has no target tokens.
    rates = [
        f"{format_count(event[name])} {label}"
        for name, label in (("target_tokens_per_second", "target tok/s"), ("tokens_per_second", "tok/s"))
        if _is_number(event.get(name)) and event[name] > 0
    ]
    shares = [f"{label} {100 * event[name]:.0f} %" for name, label in _SHARES if _is_number(event.get(name))]
    return "  ".join([*shown, *rates[:1], *shares])


class PlainProgress(TrainingProgress):
    """Writes a line when something was logged, at most one in ten seconds, but every evaluation and the last step."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to ``stream``; ``clock`` gives seconds from any origin."""
        self._stream = stream
        self._clock = clock
        self._started = (0.0, 0)
        self._num_steps = 0
        self._last_line = -SECONDS_BETWEEN_LINES

    def start(self, num_steps: int, step: int) -> None:
        """Remember where training begins; the time left is judged from here."""
        self._num_steps = num_steps
        self._started = (self._clock(), step)
        self._last_line = self._clock() - SECONDS_BETWEEN_LINES

    def show(self, event: Mapping[str, Any]) -> None:
        """Write the event, unless a line was just written."""
        step, now = event["step"], self._clock()
        if event["kind"] == "train" and step < self._num_steps and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        if event["kind"] == "train":
            self._last_line = now
        began, first_step = self._started
        words = [f"step {step}/{self._num_steps}", describe_event(event)]
        if event["kind"] == "train" and first_step < step < self._num_steps:
            words.append(f"eta {format_duration((now - began) / (step - first_step) * (self._num_steps - step))}")
        self.say("  ".join(words))

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
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveProgress(TrainingProgress):
    """A bar with the latest figures and the time left; an evaluation has a bar of its own while it runs."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on ``stream``, a terminal."""
        self._console = Console(file=stream)
        self._display = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", style="cyan"),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._training: TaskID | None = None

    def start(self, num_steps: int, step: int) -> None:
        """Draw the bar; after a rollback in place of the one before."""
        if self._training is not None:
            self._display.remove_task(self._training)
        self._training = self._display.add_task("train", total=num_steps, completed=step, figures="")
        self._display.start()

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._training is not None:
            self._display.update(self._training, completed=step)

    def show(self, event: Mapping[str, Any]) -> None:
        """Put the figures of a training event beside the bar; an evaluation's stay above it as a line."""
        if event["kind"] == "train" and self._training is not None:
            self._display.update(self._training, figures=describe_event(event))
        else:
            self._console.print(f"step {event['step']}  {describe_event(event)}", highlight=False)

    def say(self, line: str) -> None:
        """Write the line above the bar."""
        self._console.print(line, highlight=False, markup=False)

    def track(self, items: Iterable[T], what: str, num_items: int) -> Iterator[T]:
        """Yield ``items`` under a bar that is gone afterwards."""
        task = self._display.add_task(what, total=num_items, figures="")
        try:
            for item in items:
                yield item
                self._display.advance(task)
        finally:
            self._display.remove_task(task)

    def stop(self) -> None:
        """Leave the last state of the bar on the terminal."""
        self._display.stop()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)

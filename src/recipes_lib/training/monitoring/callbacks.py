"""Metrics and progress on upstream's Trainer: the one place where its callback protocol meets ours."""

from __future__ import annotations

from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import TrainingProgress

STATE_KEY = "recipes_lib_metrics"
"""Under which the counts travel in a checkpoint's ``trainer_state.json``."""
EVALUATION_KEY = "recipes_lib_evaluation"
"""Under which it tells which step was evaluated last, and whether the run stopped where an evaluation was due."""


class MetricsCallback(TrainerCallback):
    """Writes ``metrics.jsonl``, keeps the throughput clock, and shows progress.

    The figures are added to upstream's ``logs``, so that trackers behind this callback report them too. It belongs on
    every process: counts are summed over all of them.

    Source: transformers ``TrainerCallback``; ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(
        self,
        counter: StepCounter,
        meter: ThroughputMeter,
        writer: MetricsWriter,
        progress: TrainingProgress,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Connect the four; ``counter`` is the one the trainer adds to and ``meter`` reads, ``group`` who counts."""
        self._counter = counter
        self._meter = meter
        self._writer = writer
        self._progress = progress
        self._group = group

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on from the counts of the checkpoint, if there is one, and drop what was logged after it."""
        stored: Any = state.stateful_callbacks
        counts = stored.get(STATE_KEY, {"seconds": 0.0})
        self._counter.restore(counts)
        self._meter.begin(counts["seconds"])
        is_owed = stored.get(EVALUATION_KEY, {}).get("is_owed", False)
        self._writer.rewind(state.global_step, is_evaluated=not is_owed)
        self._progress.start(state.max_steps, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the clock run."""
        self._meter.go_on()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before a log, an evaluation or a checkpoint: stop the clock and sum the counts over all processes."""
        self._progress.advance(state.global_step)
        self._interrupt(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do as after a step: with the ``epoch`` strategies it is here that upstream logs, evaluates and saves."""
        self._interrupt(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write and show the figures of a training step or an evaluation; upstream's closing summary is neither."""
        logs = {} if logs is None else logs
        is_training = "loss" in logs
        figures = self._meter.measure() if is_training else {}
        # Trackers, which come after, complain of every figure that is not known.
        logs.update({name: value for name, value in figures.items() if value is not None})
        if is_training or any(name.startswith("eval_") for name in logs):
            event = {"kind": "train" if is_training else "eval", "step": state.global_step, **logs, **figures}
            self._writer.write(event)
            self._progress.show(event)
        self._go_on_unless_interrupted(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let the clock run again unless a checkpoint is due."""
        self._go_on_unless_interrupted(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let the clock run again."""
        self._go_on_unless_interrupted(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the terminal back."""
        self._progress.stop()

    def _interrupt(self, state: TrainerState, control: TrainerControl) -> None:
        if _is_interrupted(control):
            self._meter.stop()
            self._counter.synchronise(self._group)
            stored: Any = state.stateful_callbacks
            stored[STATE_KEY] = {**self._counter.totals(), "seconds": self._meter.seconds}

    def _go_on_unless_interrupted(self, control: TrainerControl) -> None:
        # Upstream logs, evaluates and saves in a row and clears each flag as it gets there; then it fetches data.
        if not _is_interrupted(control):
            self._meter.go_on()


def _is_interrupted(control: TrainerControl) -> bool:
    return control.should_log or control.should_evaluate or control.should_save

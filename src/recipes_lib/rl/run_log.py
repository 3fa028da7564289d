"""Logging of a PPO run: ``metrics.jsonl``, ``samples.jsonl``, terminal and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.rl.state import PPOState
from recipes_lib.training.evaluation.samples import SAMPLES_FILE, Sample
from recipes_lib.training.monitoring.callbacks import Trackers
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter, read_peak_memory
from recipes_lib.training.monitoring.progress import TrainingProgress, build_progress


class RunLog:
    """Writes on the main process, and nothing on the others.

    Attributes:
        progress: What the terminal shows.
    """

    def __init__(
        self, args: TrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
    ) -> None:
        """Write nothing yet.

        Args:
            args: Output directory and trackers.
            model: The policy, which trackers describe.
            tokenizer: Its own.
            num_prompts: Of an epoch.
        """
        output_dir, is_main = Path(str(args.output_dir)), args.process_index == 0
        self.progress: TrainingProgress = build_progress(is_main=is_main)
        self._metrics = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
        self._samples = MetricsWriter(output_dir / SAMPLES_FILE, is_main=is_main)
        self._trackers = Trackers(args, model, tokenizer)
        self._num_prompts = num_prompts

    def begin(self, state: PPOState, num_steps: int, *, is_evaluated: bool) -> None:
        """Resume from a state of a run of ``num_steps``; what was written after it is dropped.

        Args:
            state: Of a checkpoint, or the first one.
            num_steps: Optimizer steps of the run.
            is_evaluated: Whether samples of that state stay; otherwise they are answered again.
        """
        self._metrics.rewind(state.step, is_evaluated=is_evaluated)
        self._samples.rewind(state.step if is_evaluated else state.step - 1)
        self.progress.start(num_steps, state.step)
        self._trackers.begin(num_steps, state.step)

    def write(self, kind: str, state: PPOState, figures: Mapping[str, Any]) -> None:
        """Write figures of ``kind`` ``train`` or ``eval`` after a state."""
        counts = {
            "iteration": state.iteration,
            "epoch": state.num_answers / self._num_prompts,
            **figures,
            "num_answers": state.num_answers,
            "num_tokens": state.num_tokens,
            "num_target_tokens": state.num_target_tokens,
            "memory_bytes": read_peak_memory(),
            "seconds": state.seconds,
        }
        event = {"kind": kind, "step": state.step, **counts}
        self._metrics.write(event)
        self.progress.show(event)
        self._trackers.log(state.step, counts)

    def write_sample(self, step: int, sample: Sample, reward: float | None) -> None:
        """Write an answer after ``step`` optimizer steps, and what it is worth, if that is known."""
        self._samples.write({"step": step, **asdict(sample), "reward": reward})

    def end(self) -> None:
        """The run is done."""
        self._trackers.end()

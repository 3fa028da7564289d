"""Benchmark scores during training: lm-eval tasks on the model in memory, limited to their first questions."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError, Problem, verify_extra
from recipes_lib.models.inference import preserve_random_states, preserve_training_state
from recipes_lib.training.collectives import compute_on_main, get_rank
from recipes_lib.training.guards.preemption import agreeing_on_stop, raise_if_stop_pending
from recipes_lib.training.guards.watchdog import WATCHDOG


def load_training_tasks(config: EvaluationConfig, positions: float) -> tuple[EvalConfig, dict[str, Any]]:
    """Load ``eval_tasks`` and their data; return their evaluation settings, and the tasks in lm-eval's format.

    Args:
        config: Evaluation keys with at least one task.
        positions: Maximum sequence length of the model.

    Raises:
        ConfigError: lm-eval is not installed, a task cannot be loaded, or its answers do not fit the positions.
    """
    verify_extra("eval_tasks", "eval", "lm_eval")
    # Imported here, because lm-eval is optional and takes seconds to import.
    from recipes_lib.evaluation.engines import find_answer_length
    from recipes_lib.evaluation.suites import load_tasks

    settings = EvalConfig(
        tasks=config.eval_tasks or [], include_path=config.eval_tasks_include_path, limit=config.eval_tasks_limit
    )
    try:
        with preserve_random_states():
            loaded = load_tasks(settings)
    except ConfigError as error:
        named = (Problem(f"eval_{problem.where}", problem.found, problem.remedy) for problem in error.problems)
        raise ConfigError(*named) from error
    problems = []
    for name, task in loaded["tasks"].items():
        if task.get_config("output_type") == "generate_until":
            length = find_answer_length(None, task.get_config("generation_kwargs") or {})
            if length >= positions:
                found = f"an answer of {length:,} tokens does not fit the {positions:,} positions of the model"
                problems.append(Problem(f"eval_tasks: {name}", found, "leave the task out"))
    if problems:
        raise ConfigError(*problems)
    return settings, loaded


@dataclass
class EvaluateTasks(TrainerCallback):
    """Evaluation hook that scores the model on benchmark tasks, on the main process while the others wait.

    It is also the callback that makes evaluations due. Weights, modes and random states are preserved. Questions and
    few-shot examples are the same at every evaluation and at any world size.

    Attributes:
        settings: Evaluation settings: number of questions, and seeds.
        tasks: Tasks in lm-eval's format.
        tokenizer: Tokenizer of the model.
        batch_size: Questions per batch.
        every: Steps between evaluations; ``None``: whenever the run evaluates.

    Source: ``recipes eval`` on the saved model has the same scores, ``tests/training/evaluation/test_task_scores.py``.
    """

    settings: EvalConfig
    tasks: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    every: int | None
    _last_step: int = field(default=0, init=False)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Store the number of the last step."""
        self._last_step = state.max_steps

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request an evaluation every ``every`` steps."""
        if self.every is not None and state.global_step % self.every == 0:
            control.should_evaluate = True

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the scores as ``TASK_METRIC``, or of a group instead of its tasks; empty if no evaluation is due.

        Raises:
            ConfigError: A metric or a filter of a task fails.
            DataError: The model's logits are not finite.
            PreemptedError: Any process has a stop request.
        """
        if self.every is not None and step % self.every and step < self._last_step:
            return {}
        scores: dict[str, float] = {}
        # The other ranks wait without reporting progress.
        waiting = contextlib.nullcontext() if get_rank() == 0 else WATCHDOG.during("waiting for benchmark scores")
        with agreeing_on_stop(), waiting:
            scores |= compute_on_main(lambda: self._ask(model))
        return scores

    def _ask(self, model: nn.Module) -> dict[str, float]:
        from recipes_lib.evaluation.engines import CachedModel, CheckedModel
        from recipes_lib.evaluation.harness import read_scores, run_tasks

        unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
        with (
            # The questions take minutes, longer than the grace time of a scheduler.
            unwrapped.register_forward_pre_hook(lambda *_: raise_if_stop_pending()),
            # lm-eval draws random numbers even when a task's name is read.
            preserve_training_state(unwrapped),
            contextlib.redirect_stderr(_WithoutBars(sys.stderr)),
            tempfile.TemporaryDirectory() as folder,
        ):
            tokenizer = copy.deepcopy(self.tokenizer)  # lm-eval sets its padding.
            engine = CheckedModel(pretrained=unwrapped, tokenizer=tokenizer, batch_size=self.batch_size)
            remembering = CachedModel(engine, Path(folder) / "answers.jsonl")
            results = run_tasks(remembering, self.tasks, self.settings, with_errors=False)
            remembering.close()
            groups = results.get("groups") or {}  # Those with a score of their own.
            members = {task.task_name for group in groups for task in self.tasks["groups"][group].get_all_tasks()}
        return {
            f"{name}_{metric.replace(', ', '_')}": score["value"]
            for name, found in {**groups, **results["results"]}.items()
            for metric, score in read_scores(found).items()
            if name not in members
        }


class _WithoutBars(io.TextIOBase):
    """Standard error without lm-eval's progress bars, most of which cannot be switched off (lm-eval 0.4.13).

    All other text passes: the watchdog and a stop request write theirs while questions are answered.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # tqdm starts every update with a carriage return, and ends a bar by a line break.
        return len(text) if text.startswith("\r") or text == "\n" else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def build_task_scores(
    config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, positions: float, batch_size: int
) -> list[EvaluateTasks]:
    """Return the evaluation hook of ``eval_tasks`` in a list, which is empty without such tasks.

    Args:
        config: Evaluation keys.
        tokenizer: Tokenizer of the model.
        positions: Maximum sequence length of the model.
        batch_size: Questions per batch.

    Raises:
        ConfigError: The tasks cannot be loaded (``load_training_tasks``).
    """
    if not config.eval_tasks:
        return []
    settings, tasks = load_training_tasks(config, positions)
    return [EvaluateTasks(settings, tasks, tokenizer, batch_size, config.eval_tasks_steps)]

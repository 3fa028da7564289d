"""Trainer callbacks: metrics and throughput, loss terms, weight norms, early stopping, experiment trackers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch import Tensor, distributed, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy

from recipes_lib.config.schema import GuardsConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.collectives import sum_over_processes
from recipes_lib.training.layouts.fsdp import compute_total_norm
from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter, read_together
from recipes_lib.training.monitoring.progress import TrainingProgress

STATE_KEY = "recipes_lib_metrics"
"""Key of the token counts in a checkpoint's ``trainer_state.json``."""
EVALUATION_KEY = "recipes_lib_evaluation"
"""Key of the last evaluated step, and whether an evaluation is pending, in the same file."""

_NO_TRACKER: Final = "write `report_to: none`: metrics.jsonl and report.html are always written"
MAX_COPIED: Final = 32 * 2**20
"""Maximum number of elements per process that are copied to measure an update: 128 MiB in float32."""


EvaluationHook = Callable[[nn.Module, int], Mapping[str, float]]
"""Evaluation between steps: maps model and step to metrics by name; must preserve model, mode and random states."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Observer of a trainer: counter, evaluation hooks, callbacks, progress, guards.

    Attributes:
        counter: Token counter, to which the trainer adds.
        hooks: Evaluation hooks, called in order.
        callbacks: Trainer callbacks.
        progress: Progress display.
        guards: Configuration of spike rollbacks and replay checks.
        user_callbacks: Those of the key `callbacks`, which a save at a stop request does not call again.
    """

    counter: StepCounter
    hooks: Sequence[EvaluationHook]
    callbacks: Sequence[TrainerCallback]
    progress: TrainingProgress
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    user_callbacks: Sequence[TrainerCallback] = ()


@dataclass
class MetricsCallback(TrainerCallback):
    """Writes ``metrics.jsonl``, measures throughput, and shows progress; required on every process.

    The metrics are added to upstream's ``logs`` in place, so that trackers, which are called later, report them too.

    Attributes:
        counter: Token counter of trainer and ``meter``.
        meter: Throughput meter.
        writer: Writer of ``metrics.jsonl``.
        progress: Progress display.
        group: Process group over which counts are summed; ``None``: all processes.

    Source: transformers ``TrainerCallback``; ``tests/training/monitoring/test_callbacks.py``.
    """

    counter: StepCounter
    meter: ThroughputMeter
    writer: MetricsWriter
    progress: TrainingProgress
    group: distributed.ProcessGroup | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore the counts of the checkpoint, if there is one, and drop metrics that were logged after it."""
        stored: Any = state.stateful_callbacks
        counts = stored.get(STATE_KEY, {"seconds": 0.0})
        self.counter.restore(counts)
        self.meter.begin(counts["seconds"], counts.get("joules", 0.0))
        # Written after the checkpoint, an evaluation of its step is repeated.
        is_evaluated = stored.get(EVALUATION_KEY, {}).get("last") == state.global_step
        self.writer.rewind(state.global_step, is_evaluated=is_evaluated)
        self.progress.start(state.max_steps, state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.meter.resume()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sum the counts over all processes and stop the clock if a log, an evaluation or a checkpoint is due."""
        self.progress.advance(state.global_step)
        # Upstream logs the multiples of `logging_steps` alone: the last steps of a run would be in no record.
        control.should_log |= args.logging_strategy == IntervalStrategy.STEPS and state.global_step == state.max_steps
        if _is_interrupted(control):
            # First: it waits for the device, which may still compute the update.
            self.counter.synchronise(self.group)
            self.meter.stop()
            stored: Any = state.stateful_callbacks
            stored[STATE_KEY] = {
                **self.counter.totals._asdict(),
                "seconds": self.meter.seconds,
                "joules": self.meter.joules,
            }

    # For the ``epoch`` strategies of logging, evaluation and saving.
    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write and show the metrics of a training step or an evaluation; ignore upstream's summary at the end."""
        is_training = "loss" in logs
        figures = self.meter.measure() if is_training else {}
        # Unknown values are omitted: trackers warn about each ``None``.
        logs.update({name: value for name, value in figures.items() if value is not None})
        if is_training or any(name.startswith("eval_") for name in logs):
            # ``figures`` again, because the file keeps unknown values as null.
            event = {"kind": "train" if is_training else "eval", "step": state.global_step, **logs, **figures}
            self.writer.write(event)
            self.progress.show(event)
        self.on_evaluate(args, state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restart the clock unless an evaluation or a checkpoint is due."""
        # Upstream logs, evaluates and saves in this order, and clears each flag before the corresponding callback.
        if not _is_interrupted(control):
            self.meter.resume()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write which step's weights were loaded as the best ones, and close the progress display."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            name = name_metric(args)
            best = {"metric": name, "best_step": state.best_global_step, "best": state.best_metric}
            self.writer.write({"kind": "best", "step": state.global_step, **best})
            self.progress.say(f"best model: {name} {state.best_metric:.4g} of step {state.best_global_step}")
        elif args.load_best_model_at_end:
            found = f"no checkpoint is of a step with a finite {name_metric(args)}"
            self.progress.say(f"load_best_model_at_end: {found}; the last weights are the result")
        self.progress.stop()


def _is_interrupted(control: TrainerControl) -> bool:
    return control.should_log or control.should_evaluate or control.should_save


class EarlyStopping(TrainerCallback):
    """Early stopping after several evaluations without improvement; writes a ``stop`` event to ``metrics.jsonl``.

    The patience is counted from the logged history, so that it is preserved when a run resumes; upstream's count
    restarts.

    Source: same decisions as transformers ``EarlyStoppingCallback``, ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(
        self, patience: int | None, threshold: float, writer: MetricsWriter, progress: TrainingProgress
    ) -> None:
        """Initialise early stopping.

        Args:
            patience: Evaluations without improvement after which training stops; ``None``: never.
            threshold: Minimum improvement.
            writer: Writer of ``metrics.jsonl``.
            progress: Progress display.
        """
        self._patience, self._threshold = patience, threshold
        self._writer, self._progress = writer, progress

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """End a run that is resumed after early stopping, unless its patience has changed."""
        if self._find_best(args, state) is not None:
            # Upstream resets ``should_training_stop`` when training begins; a run at its last step is not trained.
            state.max_steps = state.global_step

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop training when the patience is exhausted."""
        if (found := self._find_best(args, state)) is not None:
            control.should_training_stop = True
            self._writer.write({"kind": "stop", "step": state.global_step, **found})
            reason = f"no improvement on {found['metric']} {found['best']:.4g} of step {found['best_step']}"
            self._progress.say(f"early stopping after step {state.global_step}: {reason}")

    def _find_best(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        """Return the best evaluation if early stopping ends the run."""
        name = name_metric(args)
        rises = bool(args.metric_for_best_model and args.greater_is_better)
        values = [(int(event["step"]), event[name]) for event in state.log_history if name in event]
        best = find_exhausted(values, self._patience, self._threshold, rises=rises)
        return None if best is None else {"metric": name, "best_step": best[0], "best": best[1]}


def name_metric(args: Any) -> str:
    """Return the metric by which evaluations are compared, ``metric_for_best_model`` or else the loss, as logged."""
    return f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"


def find_exhausted(
    values: Sequence[tuple[int, float]], patience: int | None, threshold: float, *, rises: bool
) -> tuple[int, float] | None:
    """Return step and value of the best evaluation if the last ``patience`` ones brought no improvement; else ``None``.

    Args:
        values: Step and value of every evaluation, in order.
        patience: Number of evaluations without improvement; ``None``: unlimited.
        threshold: Minimum improvement, exclusive.
        rises: Whether a larger value is better.
    """
    if patience is None or not values:
        return None
    # The first evaluation is the best so far, unless it is NaN: comparisons with it are false.
    best, count = (values[0][0], -math.inf if rises else math.inf), -1
    for step, value in values:
        gain = value - best[1] if rises else best[1] - value
        count = 0 if gain > threshold else count + 1
        if gain > 0:
            best = (step, value)
    return best if count >= patience else None


class TermMetrics(TrainerCallback):
    """Adds means of loss terms, over the steps since the last log, to the metrics of a logged step.

    Sums under the same names share their divisor; those under others, such as the sums of another kind of step, have
    another.

    Source: ``tests/training/monitoring/test_callbacks.py``, ``tests/distributed/test_pairs.py``.
    """

    def __init__(self) -> None:
        """Initialise without terms."""
        self._groups: dict[tuple[str, ...], list[int | Tensor]] = {}  # By names: the number of terms, and the sums.

    def add(self, sums: Mapping[str, Tensor], num_terms: int | Tensor) -> None:
        """Add the sums of a micro-batch; scalar tensors stay on their device, without synchronisation."""
        names = tuple(sorted(sums))
        added: list[int | Tensor] = [num_terms, *(sums[name] for name in names)]
        before = self._groups.get(names)
        self._groups[names] = added if before is None else list(map(operator.add, before, added))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Drop the sums of steps that were rolled back."""
        self._groups = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add the means over all ranks to the metrics of a training step."""
        if "loss" not in logs:
            return
        # Sorted, because the reduction is positional.
        for names, values in sorted(self._groups.items(), key=lambda group: group[0]):
            num_terms, *sums = sum_over_processes(read_together(values))
            if num_terms:
                logs.update({name: value / num_terms for name, value in zip(names, sums, strict=True)})
        self._groups = {}


class WeightMonitor(TrainerCallback):
    """Adds ``parameter_norm`` and ``update_ratio`` to the metrics of a logged step.

    ``update_ratio`` is the L2 norm of the last step's update divided by that of the weights before it. For models above
    ``MAX_COPIED`` elements it is measured on a sample of parameters spread over the layers. A ratio of about 1e-3 is
    usual; a much larger one indicates a too large learning rate.

    Source: ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(
        self,
        measure_norm: Callable[[Sequence[Tensor]], Tensor] = compute_total_norm,
        list_counted: Callable[[Iterable[nn.Parameter]], list[nn.Parameter]] = list,
    ) -> None:
        """Initialise without parameters.

        Args:
            measure_norm: Function that computes the norm of tensors over all processes that hold parts of them.
            list_counted: Function that selects, of this process's parameters, those that no other process counts.
        """
        self._measure, self._list_counted = measure_norm, list_counted
        self._parameters: list[nn.Parameter] = []
        self._sample: list[int] = []
        self._before: list[Tensor] = []
        self._figures: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find the trained parameters; only now, because FSDP2 replaces the parameters of the constructed model."""
        trained = [parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad]
        self._parameters = self._list_counted(trained)
        self._sample = choose_sample([parameter.numel() for parameter in self._parameters], MAX_COPIED)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Copy the sampled weights before a step that will be logged."""
        # Only logged steps: the copy costs memory, and the norms synchronise with the device.
        self._before = [self._parameters[at].detach().clone() for at in self._sample] if _is_logged(args, state) else []

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Compute the norms of weights and update."""
        if not self._before:
            return
        now = [self._parameters[at].detach() for at in self._sample]
        update = [after - before for after, before in zip(now, self._before, strict=True)]
        weights = [parameter.detach() for parameter in self._parameters]
        of_weights, of_update, of_sample = read_together(
            [self._measure(part) for part in (weights, update, self._before)]
        )
        self._figures = {"parameter_norm": of_weights, "update_ratio": of_update / max(of_sample, 1e-30)}
        self._before = []

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add the norms to the metrics of a training step."""
        if "loss" in logs:
            logs.update(self._figures)
            self._figures = {}  # The next log may be that of an epoch, whose last step is not measured.


def choose_sample(sizes: Sequence[int], budget: int) -> list[int]:
    """Return indices of evenly spaced parameters with at most ``budget`` elements together.

    Larger ones are left out, such as an embedding; if all are larger, the index of the smallest is returned.
    """
    smallest = min(sizes, default=0)
    fitting = [at for at, size in enumerate(sizes) if size <= max(budget, smallest)]
    spaced = (fitting[::stride] for stride in range(1, len(fitting) + 1))
    return next((chosen for chosen in spaced if sum(sizes[at] for at in chosen) <= budget), fitting[:1])


def _is_logged(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the next step will be logged; the last step of an epoch is not known in advance."""
    step = state.global_step + 1
    is_due = step % max(1, int(state.logging_steps)) == 0 or step == state.max_steps
    return (args.logging_strategy == IntervalStrategy.STEPS and is_due) or (step == 1 and args.logging_first_step)


class _TolerantTracker:
    """Wraps a tracker's callback, whose failure after the first step must not end the run."""

    def __init__(self, callback: TrainerCallback, say: Callable[[str], None]) -> None:
        self._callback, self._say = callback, say
        self._has_failed = False

    def __getattr__(self, event: str) -> Any:
        return partial(self._call, getattr(self._callback, event))

    def _call(self, call: Callable[..., Any], args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        if self._has_failed:
            return None
        try:
            return call(args, state, control, **kwargs)
        except Exception as error:
            name = type(self._callback).__name__.removesuffix("Callback")
            found = f"{name} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if state.global_step == 0:
                raise ConfigError(Problem("report_to", found, _NO_TRACKER)) from error
            self._has_failed = True
            self._say(f"report_to: {found}; the run continues without it, metrics.jsonl has the same figures")


def tolerate_tracker_failures(handler: Any, args: TrainingArguments, say: Callable[[str], None]) -> None:
    """Log failures of the trackers of ``report_to``, such as of their server, instead of ending the run.

    Before the first step they are a ``ConfigError``: a missing login is found at once.

    Args:
        handler: Upstream's ``CallbackHandler``, which calls the trackers.
        args: Training arguments with ``report_to``.
        say: Logger.
    """
    kinds: Any = tuple(get_reporting_integration_callbacks(args.report_to))  # type: ignore[no-untyped-call]
    handler.callbacks = [
        _TolerantTracker(callback, say) if isinstance(callback, kinds) else callback for callback in handler.callbacks
    ]


class Trackers:
    """Upstream's ``report_to`` callbacks for a custom training loop; required on every process.

    Source: ``transformers.Trainer`` uses the same callbacks; ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(
        self, args: TrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
    ) -> None:
        """Create the callbacks; trackers connect in ``begin``.

        Args:
            args: Training arguments with ``report_to``.
            model: Model, whose configuration trackers record.
            tokenizer: Tokenizer, for the same purpose.
            say: Logger.
        """
        self._args = args
        kinds: list[Any] = get_reporting_integration_callbacks(args.report_to)  # type: ignore[no-untyped-call]
        # CallbackHandler warns if DefaultFlowCallback is missing.
        callbacks = [DefaultFlowCallback, *kinds]
        self._handler: Any = CallbackHandler(callbacks, model, tokenizer, None, None)  # type: ignore[no-untyped-call]
        tolerate_tracker_failures(self._handler, args, say)
        self._state, self._control = TrainerState(), TrainerControl()

    def begin(self, num_steps: int, step: int) -> None:
        """Start a run of ``num_steps``, or resume it after ``step``."""
        self._state = TrainerState(
            global_step=step,
            max_steps=num_steps,
            is_local_process_zero=self._args.local_process_index == 0,
            is_world_process_zero=self._args.process_index == 0,
        )
        self._handler.on_train_begin(self._args, self._state, self._control)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Report metrics after ``step`` steps, without those that are ``None``."""
        self._state.global_step = step
        known = {name: value for name, value in figures.items() if value is not None}
        self._handler.on_log(self._args, self._state, self._control, known)

    def end(self) -> None:
        """End the run."""
        self._handler.on_train_end(self._args, self._state, self._control)


def verify_trackers(config: RecipeConfig) -> None:
    """Verify that all trackers of ``report_to`` are installed.

    Raises:
        ConfigError: Trackers that are not installed.
    """
    wanted = config.read("report_to")
    names = [wanted] if isinstance(wanted, str) else wanted or []
    available = [*get_available_reporting_integrations(), "none", "all"]  # type: ignore[no-untyped-call]
    missing = [name for name in names if name not in available]
    if missing:
        remedy = f"pip install {{}}, or {_NO_TRACKER}"
        raise ConfigError(*(Problem("report_to", f"{name} is not installed", remedy.format(name)) for name in missing))

"""Callbacks: metrics and throughput, loss terms, weight norms, early stopping, experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, distributed, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from recipes_lib.config.schema import GuardsConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.collectives import sum_over_processes
from recipes_lib.training.layouts.fsdp import compute_total_norm
from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter, read_together
from recipes_lib.training.monitoring.progress import TrainingProgress

STATE_KEY = "recipes_lib_metrics"
"""Key of the counts in a checkpoint's ``trainer_state.json``."""
EVALUATION_KEY = "recipes_lib_evaluation"
"""Key of the last evaluated step, and whether an evaluation is pending, in the same file."""

MAX_COPIED: Final = 32 * 2**20
"""Parameters of this process whose values before a step are kept to compare: 128 MiB in float32."""


EvaluationHook = Callable[[nn.Module, int], Mapping[str, float]]
"""Evaluation between steps: from a model and its number of optimizer steps to named figures; it must not change model,
mode and random states."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Observer of a trainer: counter, evaluation hooks, callbacks, progress, guards.

    Attributes:
        counter: Tokens trained on; the trainer adds to it.
        hooks: What an evaluation runs, in order.
        callbacks: Upstream's callbacks.
        progress: What the terminal shows.
        guards: What is done about spikes, and how often the machine is checked.
    """

    counter: StepCounter
    hooks: Sequence[EvaluationHook]
    callbacks: Sequence[TrainerCallback]
    progress: TrainingProgress
    guards: GuardsConfig = field(default_factory=GuardsConfig)


@dataclass
class MetricsCallback(TrainerCallback):
    """Writes ``metrics.jsonl``, keeps the throughput clock, and shows progress.

    The figures are added to upstream's ``logs``, so that trackers behind this callback report them too. It belongs on
    every process: counts are summed over all of them.

    Attributes:
        counter: The one that the trainer adds to and ``meter`` reads.
        meter: The clock.
        writer: Of ``metrics.jsonl``.
        progress: The display.
        group: Processes that count different rows; ``None``: all.

    Source: transformers ``TrainerCallback``; ``tests/training/monitoring/test_callbacks.py``.
    """

    counter: StepCounter
    meter: ThroughputMeter
    writer: MetricsWriter
    progress: TrainingProgress
    group: distributed.ProcessGroup | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Resume from the counts of the checkpoint, if there is one, and drop what was logged after it."""
        stored: Any = state.stateful_callbacks
        counts = stored.get(STATE_KEY, {"seconds": 0.0})
        self.counter.restore(counts)
        self.meter.begin(counts["seconds"])
        is_owed = stored.get(EVALUATION_KEY, {}).get("is_owed", False)
        self.writer.rewind(state.global_step, is_evaluated=not is_owed)
        self.progress.start(state.max_steps, state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.meter.resume()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before a log, an evaluation or a checkpoint: stop the clock and sum the counts over all processes."""
        self.progress.advance(state.global_step)
        self._interrupt(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Do as after a step: with the ``epoch`` strategies it is here that upstream logs, evaluates and saves."""
        self._interrupt(state, control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write and show the figures of a training step or an evaluation; upstream's closing summary is neither."""
        logs = {} if logs is None else logs
        is_training = "loss" in logs
        figures = self.meter.measure() if is_training else {}
        # Trackers, which come after, complain of every figure that is not known.
        logs.update({name: value for name, value in figures.items() if value is not None})
        if is_training or any(name.startswith("eval_") for name in logs):
            event = {"kind": "train" if is_training else "eval", "step": state.global_step, **logs, **figures}
            self.writer.write(event)
            self.progress.show(event)
        self._resume_unless_interrupted(control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restart the clock unless a checkpoint is due."""
        self._resume_unless_interrupted(control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restart the clock."""
        self._resume_unless_interrupted(control)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write which step's weights were loaded as the best ones, and close the progress display."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            name = _name_metric(args)
            best = {"metric": name, "best_step": state.best_global_step, "best": state.best_metric}
            self.writer.write({"kind": "best", "step": state.global_step, **best})
            self.progress.say(f"best model: {name} {state.best_metric:.4g} of step {state.best_global_step}")
        elif args.load_best_model_at_end:
            self.progress.say(
                "load_best_model_at_end: no evaluated step has a checkpoint; the last weights are the result"
            )
        self.progress.stop()

    def _interrupt(self, state: TrainerState, control: TrainerControl) -> None:
        if _is_interrupted(control):
            self.meter.stop()
            self.counter.synchronise(self.group)
            stored: Any = state.stateful_callbacks
            stored[STATE_KEY] = {**self.counter.totals(), "seconds": self.meter.seconds}

    def _resume_unless_interrupted(self, control: TrainerControl) -> None:
        # Upstream logs, evaluates and saves in a row and clears each flag as it gets there; then it fetches data.
        if not _is_interrupted(control):
            self.meter.resume()


def _is_interrupted(control: TrainerControl) -> bool:
    return control.should_log or control.should_evaluate or control.should_save


class EarlyStopping(TrainerCallback):
    """Early stopping after several evaluations without improvement; writes a ``stop`` event to ``metrics.jsonl``.

    The count is read from what was logged, so that it continues where a run is resumed; upstream's begins again.

    Source: transformers ``EarlyStoppingCallback`` decides alike (``tests/training/monitoring/test_callbacks.py``).
    """

    def __init__(
        self, patience: int | None, threshold: float, writer: MetricsWriter, progress: TrainingProgress
    ) -> None:
        """Never stop without a ``patience``."""
        self._patience, self._threshold = patience, threshold
        self._writer, self._progress = writer, progress

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """End a run that is resumed after early stopping, unless its patience has changed."""
        if self._find_best(args, state) is not None:
            state.max_steps = state.global_step

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop when the patience is exhausted."""
        if (found := self._find_best(args, state)) is not None:
            control.should_training_stop = True
            self._writer.write({"kind": "stop", "step": state.global_step, **found})
            told = f"{found['metric']} {found['best']:.4g} of step {found['best_step']} was not bettered"
            self._progress.say(f"early stopping after step {state.global_step}: {told}")

    def _find_best(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        """Return the best evaluation if early stopping ends the run."""
        name = _name_metric(args)
        rises = bool(args.metric_for_best_model and args.greater_is_better)
        values = [(int(event["step"]), event[name]) for event in state.log_history if name in event]
        best = find_exhausted(values, self._patience, self._threshold, rises=rises)
        return None if best is None else {"metric": name, "best_step": best[0], "best": best[1]}


def _name_metric(args: Any) -> str:
    return f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"


def find_exhausted(
    values: Sequence[tuple[int, float]], patience: int | None, threshold: float, *, rises: bool
) -> tuple[int, float] | None:
    """Return step and value of the best evaluation if the last ``patience`` ones brought no improvement; else ``None``.

    Args:
        values: Step and value of every evaluation, in order.
        patience: Evaluations without a gain; ``None``: any number.
        threshold: What a gain must exceed.
        rises: Whether more is better.
    """
    if patience is None or not values:
        return None
    sign, (best, *others), count = (1 if rises else -1), values, 0
    for step, value in others:
        # A NaN is no gain: comparisons with it are false.
        count = 0 if sign * (value - best[1]) > threshold else count + 1
        if sign * (value - best[1]) > 0:
            best = (step, value)
    return best if count >= patience else None


class TermMetrics(TrainerCallback):
    """Adds the means of loss terms since the last log to the metrics of a logged step.

    Source: ``tests/training/monitoring/test_callbacks.py``, ``tests/distributed/test_pairs.py``.
    """

    def __init__(self) -> None:
        """Start without terms."""
        self._num_terms: int | Tensor = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], num_terms: int | Tensor) -> None:
        """Add a batch of this process; scalars stay on their device, so nothing waits for it."""
        self._num_terms += num_terms
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Drop the metrics of steps that were rolled back."""
        self._num_terms, self._sums = 0, {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add the means over all ranks to the metrics of a training step."""
        if logs is None or "loss" not in logs:
            return
        names = sorted(self._sums)
        num_terms, *sums = sum_over_processes(read_together([self._num_terms, *(self._sums[name] for name in names)]))
        if num_terms:
            logs.update({name: value / num_terms for name, value in zip(names, sums, strict=True) if name != "loss"})
        self._num_terms, self._sums = 0, {}


class WeightMonitor(TrainerCallback):
    """Adds ``parameter_norm`` and ``update_ratio`` to the metrics of a logged step.

    ``update_ratio`` is the norm of the last step's update over the norm of what it updated, of a sample of matrices
    spread over the layers where the model is too large to be copied. About 1e-3 is usual; far above, the rate is too
    high.

    Source: ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(
        self,
        measure_norm: Callable[[Sequence[Tensor]], Tensor] = compute_total_norm,
        list_counted: Callable[[Iterable[nn.Parameter]], list[nn.Parameter]] = list,
    ) -> None:
        """Select nothing yet.

        Args:
            measure_norm: Gives the norm of some tensors of the model, over all processes that hold such.
            list_counted: Gives those parameters of this process that no other one counts.
        """
        self._measure, self._list_counted = measure_norm, list_counted
        self._parameters: list[nn.Parameter] = []
        self._sample: list[int] = []
        self._before: list[Tensor] = []
        self._figures: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find the trained parameters; FSDP2 has replaced those of the constructed model."""
        trained = [parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad]
        self._parameters = self._list_counted(trained)
        self._sample = choose_sample([parameter.numel() for parameter in self._parameters], MAX_COPIED)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the sampled weights of a step that will be logged."""
        # Of steps that will be logged alone: the copy costs memory, and two norms a transfer from the device.
        self._before = [self._parameters[at].detach().clone() for at in self._sample] if _is_logged(args, state) else []

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Compare them with their values after the step."""
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
        """Add them to the metrics of a training step."""
        if logs is not None and "loss" in logs:
            logs.update(self._figures)


def choose_sample(sizes: Sequence[int], budget: int) -> list[int]:
    """Return positions of parameters, spread evenly over the model, that together hold at most ``budget`` numbers.

    The smallest is taken where none fits.
    """
    for stride in range(1, len(sizes) + 1):
        chosen = list(range(0, len(sizes), stride))
        if sum(sizes[at] for at in chosen) <= budget:
            return chosen
    return [min(range(len(sizes)), key=sizes.__getitem__)] if sizes else []


def _is_logged(args: TrainingArguments, state: TrainerState) -> bool:
    step = state.global_step + 1
    every = max(1, int(state.logging_steps))
    return step % every == 0 or (step == 1 and args.logging_first_step)


class Trackers:
    """Upstream's callbacks of ``report_to``, for a loop that is not upstream's trainer; on every process.

    Source: ``transformers.Trainer``, which reports by the same callbacks;
    ``tests/training/monitoring/test_callbacks.py``.
    """

    def __init__(self, args: TrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Connect nothing yet; ``model`` and ``tokenizer`` are described to the trackers."""
        self._args = args
        kinds: list[Any] = get_reporting_integration_callbacks(args.report_to)  # type: ignore[no-untyped-call]
        # Without the first one, which decides what is due in upstream's loop, there is a warning.
        callbacks = [DefaultFlowCallback, *kinds]
        self._handler: Any = CallbackHandler(callbacks, model, tokenizer, None, None)  # type: ignore[no-untyped-call]
        self._state, self._control = TrainerState(), TrainerControl()

    def begin(self, num_steps: int, step: int) -> None:
        """A run of ``num_steps`` begins, or resumes after ``step`` of them."""
        self._state = TrainerState(
            global_step=step,
            max_steps=num_steps,
            is_local_process_zero=self._args.local_process_index == 0,
            is_world_process_zero=self._args.process_index == 0,
        )
        self._handler.on_train_begin(self._args, self._state, self._control)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Report what is known after ``step`` steps."""
        self._state.global_step = step
        known = {name: value for name, value in figures.items() if value is not None}
        self._handler.on_log(self._args, self._state, self._control, known)

    def end(self) -> None:
        """The run is done."""
        self._handler.on_train_end(self._args, self._state, self._control)


def verify_trackers(config: RecipeConfig) -> None:
    """Refuse a tracker that is not installed, before anything is loaded.

    Raises:
        ConfigError: Naming every one.
    """
    wanted = config.read("report_to")
    names = [wanted] if isinstance(wanted, str) else wanted
    available = [*get_available_reporting_integrations(), "none", "all"]  # type: ignore[no-untyped-call]
    missing = [name for name in names if name not in available]
    if missing:
        remedy = "pip install {}, or write `report_to: none`: metrics.jsonl and report.html are always there"
        raise ConfigError(*(Problem("report_to", f"{name} is not installed", remedy.format(name)) for name in missing))

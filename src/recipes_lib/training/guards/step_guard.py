"""The step guard: non-finite values, loss spikes and rollback, judged before every update."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.neftune import deactivate_neftune
from transformers.trainer_utils import SaveStrategy

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.training.checkpoints.manifest import supersede
from recipes_lib.training.collectives import broadcast_object
from recipes_lib.training.guards.replay_check import (
    STEPS_AFTER,
    STEPS_BEFORE,
    ReplayCheck,
    Rollback,
    Rollbacks,
    find_step_before,
    read_rollbacks,
)
from recipes_lib.training.guards.step_facts import MAX_SKIPPED, StepInputs, TrainerView, stop_before_update
from recipes_lib.training.layouts.fsdp import get_whole
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter

WINDOW: Final = 50
"""Window: steps that a new one is compared with."""
MIN_STEPS: Final = 20
"""Steps before the first judgement: a median deviation of fewer is too uncertain for the factor below."""
FACTOR: Final = 6.0
"""Standard deviations above the median, of normally distributed figures, at which one is a spike."""
MAD_TO_STD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 / Phi^-1(3/4)."""
FLOOR: Final = 0.02
"""Smallest deviation that counts, as a share of the median: a curve without noise is not judged by its last digits."""
UPPER_TO_STD: Final = 1 / statistics.NormalDist().inv_cdf(0.9)
"""Standard deviation of a normal distribution over the distance of its last decile from the median."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A spike in a metric.

    Attributes:
        figure: ``loss`` or ``grad_norm``.
        value: Its value.
        median: Over the steps before.
        threshold: Above which it is a spike.
    """

    figure: str
    value: float
    median: float
    threshold: float

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.figure]
        return f"{name} {self.value:.4g}, where {self.threshold:.4g} is the limit and {self.median:.4g} the median"


class SpikeMonitor:
    """Detects spikes: compares loss and gradient norm of each step with the previous steps.

    A figure is a spike when it exceeds ``median + 6 * 1.4826 * MAD`` of the last 50 steps, where the deviation counts
    for at least 2 % of the median. Unlike mean and variance, median and MAD are not moved by the spike itself, nor by
    the descent that came before. Norms of gradients, and losses while all are above 0, are judged by their logarithms:
    their noise multiplies, as that of a loss of pairs, of which few are left to learn. Other losses may be as skewed:
    their deviation is at least what the upper tenth of them tells. Where all that tells is 0, nothing is a spike.

    Source: ``tests/training/guards/test_spikes.py``.
    """

    def __init__(self) -> None:
        """Start with no step."""
        self._windows: dict[str, deque[float]] = {}

    def judge(self, loss: float, grad_norm: float, kind: str = "") -> Spike | None:
        """Return the spikes of a step, the loss first; then add the step to the window.

        Args:
            loss: Mean of the step, finite, of any sign.
            grad_norm: Before clipping, finite.
            kind: Kind of the step; it is compared with steps of its kind.
        """
        log_norm = math.log(max(grad_norm, 1e-30))  # A norm of 0 has no logarithm.
        losses, log_norms = (self._open(f"{kind}_{name}" if kind else name) for name in ("losses", "log_norms"))
        # Both before either is added: each is judged by the steps before it. A spike is added too, so that a loss that
        # stays at its new level stops being one.
        spike = _judge_loss(losses, loss)
        of_norm = _judge_logarithm("grad_norm", log_norms, log_norm)
        losses.append(loss)
        log_norms.append(log_norm)
        return spike or of_norm

    def export(self) -> dict[str, list[float]]:
        """Return what the next judgement depends on, as JSON values."""
        return {name: list(window) for name, window in self._windows.items()}

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Restore the state of ``export``; start new if it is empty."""
        self._windows = {name: deque(window, maxlen=WINDOW) for name, window in exported.items()}

    def _open(self, name: str) -> deque[float]:
        return self._windows.setdefault(name, deque(maxlen=WINDOW))


def _judge_loss(before: Sequence[float], loss: float) -> Spike | None:
    if len(before) < MIN_STEPS:
        return None
    if min(*before, loss) > 0:
        return _judge_logarithm("loss", [math.log(earlier) for earlier in before], math.log(loss))
    median = statistics.median(before)
    upper = statistics.quantiles(before, n=10, method="inclusive")[-1]
    return _judge("loss", before, loss, max(FLOOR * abs(median), UPPER_TO_STD * (upper - median)))


def _judge_logarithm(figure: str, before: Sequence[float], value: float) -> Spike | None:
    """Judge by logarithms; what is told are the figures themselves."""
    # The logarithm of a ratio of 1.02.
    spike = _judge(figure, before, value, FLOOR)
    return spike and Spike(figure, *map(math.exp, (spike.value, spike.median, spike.threshold)))


def _judge(figure: str, before: Sequence[float], value: float, floor: float) -> Spike | None:
    if len(before) < MIN_STEPS:
        return None
    # Both hardly move until half of the window is spoilt.
    median = statistics.median(before)
    deviation = max(MAD_TO_STD * statistics.median(abs(earlier - median) for earlier in before), floor)
    threshold = median + FACTOR * deviation
    return Spike(figure, value, median, threshold) if deviation and value > threshold else None


STATE_KEY: Final = "recipes_lib_spikes"
"""Key of the spike window in a checkpoint's ``trainer_state.json``."""


class _SpikedError(Exception):
    """Leaves upstream's training loop before the update of a spike."""

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(str(rollback))
        self.rollback = rollback


class StepGuard(TrainerCallback):
    """Judges the loss and the gradient of every step before its update, on all processes alike.

    What is not finite stops the run. A spike is told; with ``max_rollbacks`` the run goes back to a checkpoint and on
    without the rows around it. Nothing is read from the device that the step would not wait for anyway: the loss of the
    step is summed over the processes behind the gradients, and comes to the host together with their norm.

    Source: ``tests/training/guards/test_step_guard.py``, ``tests/distributed/test_guards.py``.
    """

    def __init__(self, trainer: TrainerView, keys: GuardsConfig) -> None:
        """Guard the steps of ``trainer``; ``keys`` say what is done besides stopping."""
        self.inputs = StepInputs()
        self.rollbacks = Rollbacks()
        self._trainer = trainer
        self._keys = keys
        self._monitor = SpikeMonitor()
        self._replay = ReplayCheck(trainer, keys.verify_steps)
        self._num_skipped = 0
        self._is_in_spike = False
        self._output_dir = Path(str(trainer.args.output_dir))
        self._writer = MetricsWriter(self._output_dir / METRICS_FILE, is_main=trainer.args.process_index == 0)

    def train(self, train: Callable[..., Any], resume_from_checkpoint: Any) -> Any:
        """Call upstream's ``train``, and again from a checkpoint after each spike."""
        trainer = self._trainer
        # Without a checkpoint the run begins anew, and meets its spikes again.
        self.rollbacks = read_rollbacks(self._output_dir) if resume_from_checkpoint else Rollbacks()
        if not resume_from_checkpoint and trainer.args.should_save:
            Rollbacks.clear(self._output_dir)
        while True:
            try:
                return train(resume_from_checkpoint=resume_from_checkpoint)
            except _SpikedError as spiked:
                rollback = spiked.rollback
            # Outside of the handler: the exception holds the frames of the loop, with the tensors of its step.
            resume_from_checkpoint = self._go_back(rollback)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the window from the checkpoint; keep ``checkpoint-0`` for rollbacks."""
        stored: Any = state.stateful_callbacks
        self._monitor.restore(stored.get(STATE_KEY, {}))
        self._num_skipped, self._is_in_spike = 0, False
        # Those after the checkpoint were dropped with everything that was logged after it.
        for rollback in self.rollbacks.made:
            if rollback.step > state.global_step:
                self._writer.write({"kind": "rollback", **asdict(rollback)})
        is_saved = args.save_strategy != SaveStrategy.NO
        if self._keys.max_rollbacks and is_saved and state.global_step == 0 and not self.rollbacks.made:
            self._trainer._save_checkpoint(self._trainer.model_wrapped, None)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare a replay if one is due."""
        self._replay.begin(state.global_step + 1)

    def judge(self, norm: Tensor | float) -> float:
        """Return the gradient norm of a step whose update may be made; call it before the gradients are clipped.

        Args:
            norm: Of the gradients of all processes.

        Raises:
            DivergedError: A loss or the norm is not finite; under fp16 the loss scaler handles the norm by itself, but
                not for ever. Or there was a spike after the last of ``max_rollbacks``.
        """
        trainer = self._trainer
        # A mean, since each process's share is multiplied by their number (``compute_share``). Every rank gets the same
        # two figures, so that all of them decide alike without another collective call.
        share = torch.stack(self.inputs.losses).sum().float()
        total = trainer.accelerator.reduce(share, reduction="mean")
        whole = get_whole(torch.as_tensor(norm)).to(total.device)
        figures: list[float] = torch.stack([total, whole.float()]).tolist()
        loss, grad_norm = figures
        step = trainer.state.global_step + 1
        if not math.isfinite(loss):
            self._stop(loss, grad_norm)
        # Of fp16 the loss must be finite and the norm need not: the scaler skips such a step and lowers its scale.
        if not math.isfinite(grad_norm):
            self._num_skipped += 1
            if not trainer.args.fp16:
                self._stop(loss, grad_norm)
            if self._num_skipped >= MAX_SKIPPED:
                why = f"the loss scaler of fp16 has skipped {MAX_SKIPPED} updates in a row: use bf16, or fp32"
                self._stop(loss, grad_norm, why)
            return grad_norm
        self._num_skipped = 0
        if step == 1:
            trainer.verify_first_loss(loss)
        # Before the window changes: a replayed step that differs ends the run, and is no figure to compare others with.
        self._replay.compare(self.inputs)
        spike = self._monitor.judge(loss, grad_norm, self.inputs.kind)
        if spike is not None:
            self._answer(spike, loss, grad_norm)
        self._is_in_spike = spike is not None
        stored: Any = trainer.state.stateful_callbacks
        stored[STATE_KEY] = self._monitor.export()
        return grad_norm

    def _stop(self, loss: float, grad_norm: float, why: str = "") -> None:
        trainer = self._trainer
        scaler: Any = trainer.accelerator.scaler
        stop_before_update(
            dict(trainer.model.named_parameters()),
            self.inputs,
            step=trainer.state.global_step + 1,
            output_dir=self._output_dir,
            facts={
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": trainer._get_learning_rate(),
                "loss_scale": None if scaler is None else scaler.get_scale(),
            },
            why=why,
            is_updated=trainer.is_deepspeed_enabled,
        )

    def _answer(self, spike: Spike, loss: float, grad_norm: float) -> None:
        """Tell a spike, or leave the training loop for an earlier step."""
        step = self._trainer.state.global_step + 1
        say = self._trainer.observer.progress.say
        is_saved = self._trainer.args.save_strategy != SaveStrategy.NO
        if self._keys.max_rollbacks and is_saved:
            if len(self.rollbacks.made) >= self._keys.max_rollbacks:
                why = f"{spike}, after {len(self.rollbacks.made)} rollbacks (max_rollbacks)"
                self._stop(loss, grad_norm, why)
            # One that is being written may be the newest before the spike.
            self._trainer.finish_saving()
            # As the main process sees the disk: ranks on other machines may list it differently for a moment.
            back_to = broadcast_object(find_step_before(self._output_dir, step))
            if back_to is not None:
                raise _SpikedError(self._plan(step, str(spike), back_to))
        if not self._is_in_spike:
            remedy = "no checkpoint lies far enough before it" if self._keys.max_rollbacks else "max_rollbacks is 0"
            say(f"step {step}: {spike}; the run continues ({remedy})")
            self._writer.write({"kind": "spike", "step": step, "cause": str(spike)})

    def _plan(self, step: int, cause: str, back_to: int) -> Rollback:
        # Steps are counted from 1, and ``find_rows`` counts them from 0.
        first = max(step - 1 - STEPS_BEFORE, 0)
        last = min(step - 1 + STEPS_AFTER, self._trainer.state.max_steps - 1)
        skipped = (self._trainer.find_rows(first)[0], self._trainer.find_rows(last)[1])
        return Rollback(step, cause, back_to, skipped, steps=(first + 1, last + 1))

    def _go_back(self, rollback: Rollback) -> str:
        """Make the record whole before anything is computed from it; return the checkpoint to resume from."""
        trainer = self._trainer
        checkpoint = self._output_dir / f"checkpoint-{rollback.back_to}"
        trainer.observer.progress.say(
            f"step {rollback.step}: {rollback.cause}; back to {checkpoint.name}, and on without the rows of steps "
            f"{rollback.steps[0]} to {rollback.steps[1]}"
        )
        self.rollbacks = Rollbacks((*self.rollbacks.made, rollback))
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            # In this order: killed in between, the run goes back to the same checkpoint and meets the spike again.
            supersede(self._output_dir, after_step=rollback.back_to)
            self.rollbacks.write(self._output_dir)
        trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.scaler is not None:
            # It would refuse to unscale twice without an update in between; its state is read from the checkpoint.
            trainer.accelerator.scaler.update()
        if trainer.neftune_noise_alpha is not None:
            # Upstream puts its noise on once more in every call of ``train``.
            deactivate_neftune(  # type: ignore[no-untyped-call]
                trainer.model, trainer.neftune_hook_handle, trainer.accelerator
            )
        return str(checkpoint)

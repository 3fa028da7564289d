"""Step guard: stops non-finite steps before their update, detects loss spikes and rolls them back, with a record."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.neftune import deactivate_neftune
from transformers.trainer_utils import SaveStrategy

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.data.tokens.dataset import RowSkips
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_json, replace_record
from recipes_lib.quantities import pluralize
from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints, supersede
from recipes_lib.training.collectives import compute_on_main
from recipes_lib.training.guards.replay_check import ReplayCheck
from recipes_lib.training.guards.step_facts import MAX_SKIPPED, StepInputs, TrainerView, dump_and_raise
from recipes_lib.training.layouts.fsdp import get_full_tensor
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter

WINDOW: Final = 50
"""Number of previous steps that a step is compared with."""
MIN_STEPS: Final = 20
"""Number of steps before the first comparison: with fewer, the MAD is too noisy for ``FACTOR``."""
FACTOR: Final = 6.0
"""Spike threshold in standard deviations above the median, for normally distributed values."""
MAD_TO_STD: Final = 1.4826
"""Ratio of standard deviation to median absolute deviation (MAD) of a normal distribution: 1 / Phi^-1(3/4)."""
FLOOR: Final = 0.02
"""Smallest deviation as a fraction of the median, so that rounding in a curve without noise is not a spike."""
UPPER_TO_STD: Final = 1 / statistics.NormalDist().inv_cdf(0.9)
"""Ratio of standard deviation to the distance between 90th percentile and median of a normal distribution."""


class SpikeMonitor:
    """Detects spikes by comparing loss and gradient norm of each step with the previous steps.

    A value is a spike if it exceeds ``median + 6 * 1.4826 * MAD`` of the last 50 steps, with a standard deviation of at
    least 2 % of the median. Median and MAD, unlike mean and variance, are robust to the spike itself and to the earlier
    descent. Gradient norms, and losses while all are positive, are compared as logarithms, because their noise is
    multiplicative, for example that of preference losses late in training. Losses of any sign may be as skewed: their
    standard deviation is at least that of a normal distribution with the same 90th percentile. A deviation of 0
    disables detection.

    Source: ``tests/training/guards/test_spikes.py``.
    """

    def __init__(self) -> None:
        """Initialise with an empty window."""
        self._windows: dict[str, deque[float]] = {}

    def find_spike(self, loss: float, grad_norm: float, kind: str = "") -> str | None:
        """Return a clause about the spike of a step, ``None`` if there is none, then add the step to the window.

        It names value, limit and median; those of the loss, if both are spikes.

        Args:
            loss: Mean loss of the step, finite, of any sign.
            grad_norm: Gradient norm before clipping, finite.
            kind: Kind of the step, which is compared with steps of the same kind only.
        """
        log_norm = math.log(max(grad_norm, 1e-30))  # A norm of 0 has no logarithm.
        names = (f"{kind}_{name}" if kind else name for name in ("losses", "log_norms"))
        losses, log_norms = (self._windows.setdefault(name, deque(maxlen=WINDOW)) for name in names)
        spike = None
        if len(losses) >= MIN_STEPS:
            spike = _find_loss_spike(losses, loss) or _find_spike("gradient norm", log_norms, log_norm)
        # Spikes are added to the window as well, so that a lasting new level is no spike after half a window.
        losses.append(loss)
        log_norms.append(log_norm)
        return spike

    def export(self) -> dict[str, list[float]]:
        """Return the windows as JSON values."""
        return {name: list(window) for name, window in self._windows.items()}

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Restore the result of ``export``; an empty one clears the windows."""
        self._windows = {name: deque(window, maxlen=WINDOW) for name, window in exported.items()}


def _find_loss_spike(before: Sequence[float], loss: float) -> str | None:
    if min(*before, loss) > 0:
        return _find_spike("loss", [math.log(earlier) for earlier in before], math.log(loss))
    median = statistics.median(before)
    upper = statistics.quantiles(before, n=10, method="inclusive")[-1]
    return _find_spike("loss", before, loss, max(FLOOR * abs(median), UPPER_TO_STD * (upper - median)), float)


def _find_spike(
    name: str, before: Sequence[float], value: float, floor: float = FLOOR, undo: Callable[[float], float] = math.exp
) -> str | None:
    """Compare a value, by default a logarithm, with earlier ones; ``undo`` returns it to its own unit."""
    # A difference of FLOOR in logarithms is a ratio of about 1 + FLOOR. Median and MAD tolerate outliers in up to half
    # of the window.
    median = statistics.median(before)
    deviation = max(MAD_TO_STD * statistics.median(abs(earlier - median) for earlier in before), floor)
    threshold = median + FACTOR * deviation
    if not (deviation and value > threshold):
        return None
    found, limit, usual = map(undo, (value, threshold, median))
    return f"{name} {found:.4g}, where {limit:.4g} is the limit and {usual:.4g} the median"


ROLLBACKS_FILE: Final = "rollbacks.json"
_REMEDY: Final = "put the file back, or choose another output_dir: without it the run would meet its spikes again"

MARGIN: Final = 2
"""Smallest number of steps from a checkpoint to the spike, since the step before the spike is skipped too."""
STEPS_BEFORE: Final = 1
"""Skipped steps before the spike: the update before it may have caused its loss."""
STEPS_AFTER: Final = 2
"""Skipped steps after the spike: neighbouring rows often come from the same source."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback to a checkpoint.

    Attributes:
        step: Step of the spike, from 1; its update was not made.
        cause: Description of the spike.
        back_to: Step of the checkpoint that the run resumed from.
        skipped: Half-open range of skipped rows, numbered after all earlier skips.
        steps: First and last step of the skipped rows, from 1, inclusive.
    """

    step: int
    cause: str
    back_to: int
    skipped: tuple[int, int]
    steps: tuple[int, int]


def find_skips(rollbacks: Iterable[Rollback]) -> RowSkips:
    """Return the rows that a run skips after its rollbacks, which are in order."""
    return reduce(lambda skips, rollback: skips.leave_out(*rollback.skipped), rollbacks, RowSkips())


def write_rollbacks(output_dir: Path, rollbacks: Iterable[Rollback]) -> None:
    """Replace ``rollbacks.json`` atomically, with fsync."""
    replace_record(output_dir / ROLLBACKS_FILE, [asdict(rollback) for rollback in rollbacks])


def read_rollbacks(output_dir: Path) -> list[Rollback]:
    """Read the rollbacks of a run, in order; empty without a file.

    Raises:
        DataError: The file is invalid.

    Source: ``tests/training/guards/test_rollback.py``.
    """
    path = output_dir / ROLLBACKS_FILE
    if not path.exists():
        return []
    records = read_json(path, remedy=_REMEDY)
    try:
        return [_restore(record) for record in records]
    except (TypeError, LookupError, ValueError, OverflowError) as error:
        raise DataError(Problem(str(path), "is not a list of rollbacks", _REMEDY)) from error


def _restore(record: Any) -> Rollback:
    """Build a rollback from a JSON object; raises Python's errors on invalid ones."""
    ranges = {name: (int(record[name][0]), int(record[name][1])) for name in ("skipped", "steps")}
    return Rollback(**{**record, **ranges, "step": int(record["step"]), "back_to": int(record["back_to"])})


def find_step_before(output_dir: Path, spike_step: int) -> int | None:
    """Return the step of the newest undamaged checkpoint at least ``MARGIN`` steps before a spike; ``None`` if none is.

    Args:
        output_dir: Output directory of the run.
        spike_step: Step of the spike, from 1.
    """
    earlier = ((step, path) for step, path in list_checkpoints(output_dir) if step <= spike_step - MARGIN)
    return next((step for step, path in earlier if find_damage(path) is None), None)


STATE_KEY: Final = "recipes_lib_spikes"
"""Key of the spike window in a checkpoint's ``trainer_state.json``."""


class _SpikedError(Exception):
    """Leaves upstream's training loop before the update of a spike, to restart it by the ``Rollback`` in ``args``."""


class StepGuard(TrainerCallback):
    """Checks loss and gradient norm of every step before its update, with the same decision on all ranks.

    Non-finite values stop the run. A spike is logged; with ``max_rollbacks`` the run is rolled back to a checkpoint and
    resumes without the rows around the spike. The check adds no device synchronisation: the step's loss is reduced over
    the ranks after the gradients, and is copied to the host together with the gradient norm, which clipping needs.

    Source: ``tests/training/guards/test_step_guard.py``, ``tests/distributed/test_guards.py``.
    """

    def __init__(self, trainer: TrainerView, keys: GuardsConfig) -> None:
        """Guard the steps of ``trainer``; ``keys`` configures rollbacks and replay checks."""
        self.inputs = StepInputs()
        self.rollbacks: list[Rollback] = []
        self._trainer = trainer
        self._keys = keys
        self._monitor = SpikeMonitor()
        self._replay = ReplayCheck(trainer, keys.verify_steps)
        self._num_skipped = 0
        self._is_in_spike = False
        self._output_dir = Path(str(trainer.args.output_dir))
        self._writer = MetricsWriter(self._output_dir / METRICS_FILE, is_main=trainer.args.process_index == 0)

    def train(self, train: Callable[..., Any], resume_from_checkpoint: Any) -> Any:
        """Call upstream's ``train``, and call it again from a checkpoint after each spike."""
        trainer = self._trainer
        # A run that starts from scratch does not skip the rows of an earlier one.
        self.rollbacks = read_rollbacks(self._output_dir) if resume_from_checkpoint else []
        if not resume_from_checkpoint and trainer.args.should_save:
            (self._output_dir / ROLLBACKS_FILE).unlink(missing_ok=True)
        while True:
            try:
                return train(resume_from_checkpoint=resume_from_checkpoint)
            except _SpikedError as spiked:
                (rollback,) = spiked.args
            # Outside of the handler, so that the exception and its frames, which hold the step's tensors, are freed.
            resume_from_checkpoint = self._go_back(rollback)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore the windows from the checkpoint; save ``checkpoint-0`` as a first target of rollbacks."""
        stored: Any = state.stateful_callbacks
        self._monitor.restore(stored.get(STATE_KEY, {}))
        self._num_skipped, self._is_in_spike, self._replay.is_first = 0, False, True
        # Resuming has truncated the metrics after the checkpoint, including the lines of these rollbacks.
        for rollback in self.rollbacks:
            if rollback.step > state.global_step:
                self._writer.write({"kind": "rollback", **asdict(rollback)})
        is_saved = args.save_strategy != SaveStrategy.NO
        if self._keys.max_rollbacks and is_saved and state.global_step == 0 and not self.rollbacks:
            self._trainer._save_checkpoint(self._trainer.model_wrapped, None)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Prepare a replay if one is due."""
        self._replay.begin(state.global_step + 1)

    def check_step(self, norm: Tensor | float) -> float:
        """Return the gradient norm of a step that may be updated; call before clipping, on every process.

        Args:
            norm: Norm of the reduced gradients before clipping, a scalar.

        Raises:
            DivergedError: The loss or the norm is not finite, except for norms that fp16's loss scaler skips, up to
                ``MAX_SKIPPED`` times in a row; or there is a spike after the last of ``max_rollbacks``.
        """
        trainer = self._trainer
        # A mean, because each process's loss is multiplied by the world size (``compute_loss``). Every rank gets the
        # same figures, so that all of them decide alike without another collective call.
        share = torch.stack(self.inputs.losses).sum().float()
        whole = get_full_tensor(torch.as_tensor(norm)).to(share.device).float()
        # Norms are equal, but for a fault of one device after the reduction of the gradients.
        figures: list[float] = trainer.accelerator.reduce(torch.stack([share, whole]), reduction="mean").tolist()
        loss, grad_norm = figures
        step = trainer.state.global_step + 1
        if not math.isfinite(loss):
            self._stop(loss, grad_norm)
        # With fp16 the norm may overflow: the loss scaler skips the update and lowers its scale.
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
        # Before the step enters the window: a faulty step raises here.
        self._replay.compare(self.inputs)
        spike = self._monitor.find_spike(loss, grad_norm, self.inputs.kind)
        if spike is not None:
            self._handle_spike(spike, loss, grad_norm)
        # A spike of several steps is logged once.
        self._is_in_spike = spike is not None
        # Into the trainer state, so that a checkpoint of this step restores the windows.
        stored: Any = trainer.state.stateful_callbacks
        stored[STATE_KEY] = self._monitor.export()
        return grad_norm

    def _stop(self, loss: float, grad_norm: float, why: str = "") -> None:
        trainer = self._trainer
        scaler: Any = trainer.accelerator.scaler
        dump_and_raise(
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

    def _handle_spike(self, spike: str, loss: float, grad_norm: float) -> None:
        """Log a spike, or leave the training loop for a rollback."""
        step = self._trainer.state.global_step + 1
        say = self._trainer.observer.progress.say
        is_saved = self._trainer.args.save_strategy != SaveStrategy.NO
        if self._keys.max_rollbacks and is_saved:
            if len(self.rollbacks) >= self._keys.max_rollbacks:
                why = f"{spike}, after {pluralize(len(self.rollbacks), 'rollback')} (max_rollbacks)"
                self._stop(loss, grad_norm, why)
            # The newest checkpoint before the spike may still be in the writer thread.
            self._trainer.finish_saving()
            # Rank 0 decides: on network file systems other machines may see the folder later.
            back_to = compute_on_main(partial(find_step_before, self._output_dir, step))
            if back_to is not None:
                raise _SpikedError(self._plan(step, spike, back_to))
        if not self._is_in_spike:
            remedy = "no checkpoint is far enough before it" if self._keys.max_rollbacks else "max_rollbacks is 0"
            say(f"step {step}: {spike}; the run continues ({remedy})")
            self._writer.write({"kind": "spike", "step": step, "cause": spike})

    def _plan(self, step: int, cause: str, back_to: int) -> Rollback:
        # ``step`` counts from 1, ``find_rows`` from 0.
        first = max(step - 1 - STEPS_BEFORE, 0)
        last = min(step - 1 + STEPS_AFTER, self._trainer.state.max_steps - 1)
        skipped = (self._trainer.find_rows(first)[0], self._trainer.find_rows(last)[1])
        return Rollback(step, cause, back_to, skipped, steps=(first + 1, last + 1))

    def _go_back(self, rollback: Rollback) -> str:
        """Record a rollback on disk, prepare the trainer for another ``train``, and return the checkpoint folder."""
        trainer = self._trainer
        checkpoint = self._output_dir / f"checkpoint-{rollback.back_to}"
        trainer.observer.progress.say(
            f"step {rollback.step}: {rollback.cause}; resuming from {checkpoint.name} without the rows of steps "
            f"{rollback.steps[0]} to {rollback.steps[1]}"
        )
        self.rollbacks.append(rollback)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            # In this order: if killed in between, the run resumes from the same checkpoint and detects the spike again.
            supersede(self._output_dir, after_step=rollback.back_to)
            write_rollbacks(self._output_dir, self.rollbacks)
        trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.scaler is not None:
            # GradScaler raises on a second unscale_() without update(); its state is then loaded from the checkpoint.
            trainer.accelerator.scaler.update()
        if trainer.neftune_noise_alpha is not None:
            # transformers 5.23 registers the noise hook again in every call of ``train``.
            deactivate_neftune(  # type: ignore[no-untyped-call]
                trainer.model, trainer.neftune_hook_handle, trainer.accelerator
            )
        return str(checkpoint)

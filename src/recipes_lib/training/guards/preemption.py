"""Preemption: all ranks agree on a stop request, save the last finished step once, and exit with code 75."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from recipes_lib.errors import PreemptedError
from recipes_lib.models.inference import save_random_states
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.collectives import gather_objects, is_any
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.callbacks import EVALUATION_KEY

GENERATION_STEPS: Final = 8
"""Generated tokens between two collective polls for stop requests."""


def stop_if_agreed() -> None:
    """Raise on every process if any has a stop request; every process must call, at the same point.

    Raises:
        PreemptedError: Any process has a stop request.
    """
    WATCHDOG.beat()
    # Outside of training a signal raises immediately, without agreement. ``is_deferred`` has the same value on all
    # ranks at the same point of the program, so that no rank enters the collective alone.
    if STOP.is_deferred and is_any(STOP.reason is not None):
        raise build_preemption()


def build_preemption() -> PreemptedError:
    """Return the same exception on all processes, with the reason of the first rank that has one; collective."""
    reasons = gather_objects(STOP.reason)
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    return PreemptedError(reason if len(reasons) == 1 else f"{reason} on rank {rank}")


def raise_if_stop_pending() -> None:
    """Report progress to the watchdog, and raise on a stop request; for computations without collectives.

    The handler must call ``stop_if_agreed`` next, as the other processes do when they have finished: see
    ``agreeing_on_stop``.

    Raises:
        StopPendingError: A stop request is pending during training.
    """
    WATCHDOG.beat()
    STOP.raise_if_pending()


@contextmanager
def agreeing_on_stop() -> Iterator[None]:
    """Context that a process may leave by ``StopPendingError``, and at whose end all processes agree whether to stop.

    Raises:
        PreemptedError: Any process has a stop request.
    """
    with suppress(StopPendingError):
        yield
    stop_if_agreed()


def close_preempted(request: PreemptedError, *, step: int, saved_step: int) -> PreemptedError:
    """Ignore further signals and return the exception for the user; call it after everything is saved.

    Args:
        request: Stop request that all processes raised.
        step: Last finished optimizer step.
        saved_step: Step of the last checkpoint; 0 if there is none.
    """
    STOP.close()
    saved = f"checkpoint-{saved_step} is complete" if saved_step else "there was nothing to save yet"
    return PreemptedError(f"{request}: stopped after step {step}; {saved}; run the same command to resume")


class LastStep(TrainerCallback):
    """Keeps the random states of the last finished step, so that it can be saved while the next one is under way.

    Also reports step progress to the watchdog, and resumes an evaluation that a preemption interrupted.

    Source: ``tests/training/guards/test_preemption.py``, ``tests/recipes/test_preempted.py``.
    """

    def __init__(self, trainer: TrainerView) -> None:
        """Initialise without a finished step."""
        self._trainer = trainer
        self._restore_random: Callable[[], None] | None = None
        self._saved_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Read the checkpoint's step and last evaluation; a resumed run skips ``eval_on_start``."""
        self._saved_step, self._restore_random = state.global_step, None
        self._trainer.last_evaluated_step = read_evaluation(args, state)[0]
        if state.global_step > 0:
            args.eval_on_start = False

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Run an interrupted evaluation; in this event, because all callbacks are initialised by then."""
        self._trainer.run_pending_evaluation()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start timing a step."""
        WATCHDOG.enter("a step" if self._restore_random is not None else "the first step")

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Report a finished micro-batch to the watchdog."""
        WATCHDOG.beat()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the random states of this step: drawing the next batch changes them before a stop request is seen."""
        self._restore_random = save_random_states()
        WATCHDOG.finish_step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Record that the last step is saved."""
        self._saved_step = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save nothing from here on if the model has the best weights, which are not those of the last step."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._restore_random = None

    def save(self, request: PreemptedError) -> PreemptedError:
        """Save the last finished step unless it is saved as it is, and return the exception for the user; collective.

        Args:
            request: Stop request that all processes raised, after an update or within an evaluation.
        """
        trainer, state = self._trainer, self._trainer.state
        # An evaluation at the end of an epoch may follow the save of its last step, which does not record it. The last
        # one of a run needs no record, because it is repeated in any case.
        is_unrecorded = trainer.is_evaluating and not trainer.control.should_training_stop
        is_unsaved = state.global_step > self._saved_step or is_unrecorded
        if self._restore_random is not None and is_unsaved and trainer.args.save_strategy != SaveStrategy.NO:
            # 1. The random states of the end of the step; the next batch has been drawn since.
            self._restore_random()
            # 2. Callbacks that prepare a save in ``on_step_end`` if one is due, such as the sums of token counts.
            trainer.control.should_save = True
            for callback in trainer.observer.callbacks:
                callback.on_step_end(trainer.args, state, trainer.control)
            # 3. An interrupted evaluation is recorded, and runs when training resumes.
            record_evaluation(state, trainer.last_evaluated_step, is_owed=trainer.is_evaluating)
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, state, trainer.control)
        trainer.finish_saving()
        # A launcher kills all ranks when the first one exits, so all wait until rank 0 has published the checkpoint.
        trainer.accelerator.wait_for_everyone()
        return close_preempted(request, step=state.global_step, saved_step=self._saved_step)


def record_evaluation(state: TrainerState, step: int, *, is_owed: bool) -> None:
    """Record the step of the last evaluation, and whether that of the present step is pending, for checkpoints."""
    stored: Any = state.stateful_callbacks
    stored[EVALUATION_KEY] = {"last": step, "is_owed": is_owed}


def read_evaluation(args: TrainingArguments, state: TrainerState) -> tuple[int, bool]:
    """Return the step of the last evaluation, -1 if there is none, and whether that of the present step is pending.

    It is pending after a preemption within it, and after a kill between the save of an epoch's last step and the
    evaluation of the epoch, which upstream makes in this order.
    """
    stored: Any = state.stateful_callbacks
    record = {"last": -1, "is_owed": False, **stored.get(EVALUATION_KEY, {})}
    epoch = state.epoch if state.global_step and args.eval_strategy == IntervalStrategy.EPOCH else None
    is_missing = epoch is not None and epoch % 1 == 0 and epoch >= args.eval_delay
    return record["last"], record["is_owed"] or (is_missing and record["last"] != state.global_step)

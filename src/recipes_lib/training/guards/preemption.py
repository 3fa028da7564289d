"""Preemption: ranks agree to stop, save the last finished step once, and exit with 75."""

from __future__ import annotations

from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipes_lib.errors import PreemptedError
from recipes_lib.models.inference import RandomStates
from recipes_lib.stopping import STOP
from recipes_lib.training.collectives import gather_objects, sum_over_processes
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.callbacks import EVALUATION_KEY

GENERATION_STEPS: Final = 8
"""Tokens between two polls for stop requests while samples are generated."""


def stop_if_agreed() -> None:
    """Raise in every process if any has a stop request; all of them must call it, in the same loop.

    Raises:
        PreemptedError: One was asked.
    """
    WATCHDOG.beat()
    # Outside of training a signal raises at once, and the processes need not agree. ``is_deferred`` is alike on all of
    # them at the same place of the code, so that none calls the collective alone.
    if STOP.is_deferred and sum_over_processes([STOP.reason is not None])[0]:
        raise build_preemption()


def build_preemption() -> PreemptedError:
    """Return the exception that all processes raise after agreeing; all of them must call it."""
    reasons = gather_objects(STOP.reason)
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    STOP.ask(reason)
    return PreemptedError(reason if len(reasons) == 1 else f"{reason} on rank {rank}")


class LeftError(Exception):
    """Leaves a computation of this process alone; the processes agree at the next collective point."""


def leave_if_asked() -> None:
    """Report progress, and raise on a stop request; for work without other processes.

    Who catches the error calls ``stop_if_agreed`` next, as the others do when they are done.

    Raises:
        LeftError: It was asked while training.
    """
    WATCHDOG.beat()
    if STOP.is_deferred and STOP.reason is not None:
        raise LeftError


def end_stopped(request: PreemptedError, *, step: int, saved_step: int) -> PreemptedError:
    """Ignore further signals, and return the message for the user; everything that was to be saved is saved.

    Args:
        request: Raised by all processes.
        step: The last finished one.
        saved_step: That of the last checkpoint; 0: there is none.
    """
    STOP.close()
    kept = f"checkpoint-{saved_step} is complete" if saved_step else "nothing was to be saved yet"
    return PreemptedError(f"{request}: stopped after step {step}; {kept}; run the same command to resume")


class LastStep(TrainerCallback):
    """Keeps the random states and counts of the last finished step, so that it can be saved during the next one.

    Also tells the watchdog how the steps go, and makes an evaluation that was left when the run stopped.

    Source: ``tests/training/guards/test_preemption.py``, ``tests/recipes/test_preempted.py``.
    """

    def __init__(self, trainer: TrainerView) -> None:
        """Start without a finished step."""
        self._trainer = trainer
        self._random: RandomStates | None = None
        self._saved_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start from the step of the checkpoint, if there is one; it is already evaluated."""
        self._saved_step = state.global_step
        self._trainer.last_evaluated_step = read_evaluation(state)["last"]
        if state.global_step > 0:
            args.eval_on_start = False

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run the interrupted evaluation, with upstream's handling of its metrics."""
        if read_evaluation(state)["is_owed"]:
            self._trainer.run_pending_evaluation()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step begins."""
        WATCHDOG.enter("a step" if self._random is not None else "the first step")

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A micro-batch is done."""
        WATCHDOG.beat()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the random states: the next rows are drawn before a stop request may be seen."""
        self._random = RandomStates.read()
        WATCHDOG.finish_step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record that the last step is saved."""
        self._saved_step = state.global_step

    def save(self, request: PreemptedError) -> PreemptedError:
        """Save the last finished step unless it is, and return the message for the user; every process must call.

        Args:
            request: Raised by all processes, after an update or inside an evaluation.
        """
        trainer, state = self._trainer, self._trainer.state
        if state.global_step > self._saved_step and trainer.args.save_strategy != SaveStrategy.NO:
            assert self._random is not None
            # 1. As they were behind the step: the request was seen after the next rows had been drawn.
            self._random.restore()
            # 2. Callbacks that prepare a save, such as the sums of token counts, act behind a step if one is due.
            trainer.control.should_save = True
            for callback in trainer.observer.callbacks:
                callback.on_step_end(trainer.args, state, trainer.control)
            # 3. An evaluation that was interrupted is made when the run resumes.
            stored: Any = state.stateful_callbacks
            stored[EVALUATION_KEY] = {"last": trainer.last_evaluated_step, "is_owed": trainer.is_evaluating}
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, state, trainer.control)
        trainer.finish_saving()
        # The launcher ends the others when the first one leaves: not before the main process has written the manifest.
        trainer.accelerator.wait_for_everyone()
        return end_stopped(request, step=state.global_step, saved_step=self._saved_step)


def read_evaluation(state: TrainerState) -> dict[str, Any]:
    """Return which step was evaluated ``last``, and whether the evaluation of this one ``is_owed``."""
    stored: Any = state.stateful_callbacks
    return {"last": -1, "is_owed": False, **stored.get(EVALUATION_KEY, {})}

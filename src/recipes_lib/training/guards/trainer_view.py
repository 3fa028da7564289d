"""The trainer as guards, start checks, preemption and replay see it: a Protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.monitoring.progress import TrainingProgress


class ObserverView(Protocol):
    """What watches a run: its progress line and its callbacks."""

    @property
    def progress(self) -> TrainingProgress:
        """What the terminal shows."""

    @property
    def callbacks(self) -> Sequence[TrainerCallback]:
        """Those that watch the run's steps."""


class TrainerView(Protocol):
    """The part of ``RecipeTrainer`` that collaborators may use; the rest of it they do not know.

    Attributes beginning with an underscore are transformers' own (5.23), which has no public ones for them.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: Any
    model_wrapped: Any
    accelerator: Any
    callback_handler: Any
    data_collator: Any
    train_dataset: Any
    is_deepspeed_enabled: Any
    neftune_noise_alpha: Any
    neftune_hook_handle: Any
    current_gradient_accumulation_steps: Any
    router_aux_loss_coef: float
    compares_rows: bool
    is_evaluating: bool
    last_evaluated_step: int
    guard: Any

    @property
    def observer(self) -> ObserverView:
        """What watches the run."""

    def uncounted_pass(self) -> AbstractContextManager[None]:
        """Compute without counting."""

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Terms of the objective in a batch."""

    def compute_loss(self, model: Any, inputs: Any, *, num_items_in_batch: Any) -> Any:
        """A batch's share of the objective."""

    def verify_first_loss(self, loss: float) -> None:
        """Hold the loss of step 1 against what it must be."""

    def find_rows(self, step: int) -> tuple[int, int]:
        """First row of a step, from 0, and the one behind its last."""

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written."""

    def run_pending_evaluation(self) -> None:
        """Make the evaluation that was left when the run stopped."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Forward and backward of a micro-batch."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The micro-batches of a step and their number of terms."""

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Mixed precision."""

    def _prepare_inputs(self, inputs: Any) -> Any: ...

    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

    def _get_learning_rate(self) -> float: ...

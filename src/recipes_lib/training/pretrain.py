"""Pretraining: upstream's trainer over rows of tokens, with the schedule and the order of the whole run known."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.token_dataset import TokenDataset
from recipes_lib.planning.schedule import Schedule
from recipes_lib.training.combinations import STOCHASTIC_ADAMW
from recipes_lib.training.invariants import verify_initial_loss
from recipes_lib.training.next_token import NextTokenTrainer
from recipes_lib.training.optimizers import build_muon
from recipes_lib.training.stochastic_rounding import StochasticAdamW
from recipes_lib.training.weight_monitor import WeightMonitor


class SaveBeforeDecay(TrainerCallback):
    """Has a checkpoint saved at the step that the decay begins at, from which a longer run can go on."""

    def __init__(self, step: int) -> None:
        """Save after ``step`` optimizer steps, unless nothing is saved at all."""
        self._step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if state.global_step == self._step and args.save_strategy != SaveStrategy.NO:
            control.should_save = True


class PretrainTrainer(NextTokenTrainer):
    """Upstream's trainer with the objective of ``NextTokenTrainer`` over rows whose order is already theirs."""

    def __init__(self, *, config: RecipeConfig, schedule: Schedule, **kwargs: Any) -> None:
        """Set upstream's trainer up.

        Args:
            config: The run: its ``optim``, which upstream's arguments cannot hold where it is ``muon``, and whether
                ``weight_decay`` applies to embeddings.
            schedule: Learning rate of each step as a share of the peak.
            **kwargs: As ``NextTokenTrainer``; ``train_dataset`` holds every row of the run in its order.
        """
        self.schedule = schedule
        self.optim = config.training.get("optim")
        self.is_from_scratch = config.model.model_config is not None
        self.decay_embeddings = config.pretraining.decay_embeddings
        if self.optim == STOCHASTIC_ADAMW:
            args = kwargs["args"]
            options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            kwargs["optimizer_cls_and_kwargs"] = (StochasticAdamW, options)
        super().__init__(**kwargs)
        # DeepSpeed has updated the weights by the time that it could look, and under ZeRO-3 no process has them.
        if not self.is_deepspeed_enabled:
            # Before the one that writes, which puts down what the figures are by then.
            self.callback_handler.callbacks.insert(1, WeightMonitor(self.measure_norm, self.list_counted))
        if schedule.first_decay_step is not None:
            self.add_callback(SaveBeforeDecay(schedule.first_decay_step))
        self.router_aux_loss_coef = getattr(self.model.config, "router_aux_loss_coef", 0.0)

    def kept_steps(self) -> set[int]:
        """Return the steps whose checkpoints are never deleted: from the start of the decay a longer run can go on."""
        first_decay_step = self.schedule.first_decay_step
        return super().kept_steps() | (set() if first_decay_step is None else {first_decay_step})

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the first row of the run that step ``step``, from 0, takes over all processes, and the one behind."""
        rows: TokenDataset = self.train_dataset  # type: ignore[assignment]
        return rows.find_rows(step)

    def verify_first_loss(self, loss: float) -> None:
        """Hold the loss of random weights against what is known of it."""
        if self.is_from_scratch:
            self.observer.progress.say(verify_initial_loss(self.model, loss, self.guard.inputs.batches))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """Take the rows as they come, without those that a rollback leaves out."""
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        rows.skips = self.guard.rollbacks.skips
        return SequentialSampler(rows)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer by name: upstream's, or Muon."""
        if self.optim != "muon":
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = build_muon(model or self.model, self.args, decay_embeddings=self.decay_embeddings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Let the learning rate follow the schedule; the rate logged with a step is the one it was made with."""
        if self.lr_scheduler is None:
            driven = self.optimizer if optimizer is None else optimizer
            assert driven is not None
            # A function is not saved with a checkpoint, so that a longer run goes on by its own schedule.
            self.lr_scheduler = LambdaLR(driven, lambda step: self.schedule(step))
            self._created_lr_scheduler = True
        return self.lr_scheduler

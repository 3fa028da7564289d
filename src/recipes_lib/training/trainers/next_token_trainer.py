"""Next-token trainers of SFT and pretraining: mean negative log-likelihood per target token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from recipes_lib.config.rules import STOCHASTIC_ADAMW
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.collators import IGNORE_INDEX
from recipes_lib.data.tokens.dataset import TokenDataset
from recipes_lib.losses.distillation import DistillationSums, Objective
from recipes_lib.losses.next_token import index_targets
from recipes_lib.models.adapters.lora import adapters_off
from recipes_lib.models.heads.loss_head import add_loss_head, pick_predictors, score_beside_record, score_beside_teacher
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.planning.schedule import Schedule
from recipes_lib.training.guards.start_checks import verify_initial_loss
from recipes_lib.training.guards.step_guard import find_skips
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import prepare_frozen
from recipes_lib.training.monitoring.callbacks import WeightMonitor
from recipes_lib.training.optim.optimizers import StochasticAdamW, build_muon
from recipes_lib.training.trainers.recipe_trainer import Batch, BatchLoss, RecipeTrainer
from recipes_lib.training.trainers.trained_model import freeze

POSITIONS: Final = "target_positions"
"""Batch key: indices of targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``, computed by the data loader."""


class NextTokenTrainer(RecipeTrainer):
    """``RecipeTrainer`` with the next-token loss, computed by a loss head at the model's output projection."""

    def __init__(self, **kwargs: Any) -> None:
        """Attach the loss head to the model and initialise the trainer.

        Args:
            **kwargs: As ``RecipeTrainer``; ``model`` is a causal language model, and ``data_collator`` returns
                ``input_ids``, ``labels`` (without targets at first tokens of documents) and ``position_ids``.
        """
        # The collator adds target positions: ``nonzero`` on the device would synchronise.
        kwargs["data_collator"] = functools.partial(_collate, kwargs["data_collator"])
        super().__init__(**kwargs)
        # It computes the loss without materialising the logits. In a pipeline, the last ``Chunk`` has it already.
        if self.launch.part is None:
            add_loss_head(self.model)

    def count_terms(self, batch: Batch) -> torch.Tensor:
        """Return the number of target tokens; ``int64`` scalar."""
        labels: torch.Tensor = batch["labels"]
        return labels.ne(IGNORE_INDEX).sum()

    def mask_batch(self, batch: Batch) -> Batch:
        """Return the batch without targets, for the collectives of other ranks only."""
        masked = {"labels": torch.full_like(batch["labels"], IGNORE_INDEX), POSITIONS: batch[POSITIONS][:0]}
        return {**batch, **masked, "num_tokens": torch.zeros_like(batch["num_tokens"])}

    def score_batch(self, model: nn.Module, inputs: Batch) -> BatchLoss:
        """Return the negative log-likelihood of the targets, in nats."""
        outputs = model(**inputs, loss_head=True)
        num_targets = outputs.num_targets
        return BatchLoss(outputs.nll_sum, num_targets, num_targets, outputs.num_correct, outputs.aux_loss)


def _collate(collate: Callable[[Any], Batch], rows: Any) -> Batch:
    # A resumed stream packs all earlier rows again within its first step, which may take hours.
    WATCHDOG.beat()
    batch = collate(rows)
    return {**batch, POSITIONS: index_targets(batch["labels"][:, 1:])}


KL_TO_BASE: Final = "kl_to_base"
"""Metric of a logged step: KL divergence to the initial model in nats per target, not multiplied by ``kl_to_base``."""


class BaseDivergence:
    """Cross-entropy plus ``coefficient * KL(model || base)`` over the targets of a batch, in chunks of targets.

    Computed as distillation with the base as teacher.

    Source: ``tests/training/trainers/test_base_divergence.py``.
    """

    def __init__(self, coefficient: float, base: PreTrainedModel | None) -> None:
        """Initialise the objective.

        Args:
            coefficient: Coefficient of the divergence, above 0.
            base: Frozen start model with a loss head; ``None``: the trained model without its adapter.
        """
        self.model: nn.Module | None = base
        # Distillation weights its two terms by alpha and 1 - alpha, so the sum is scaled by 1 + c:
        # (1 + c) * (CE / (1 + c) + c / (1 + c) * KL) = CE + c * KL.
        self._objective = Objective(alpha=1 / (1 + coefficient), beta=1.0)
        self._scale = 1 + coefficient

    def score(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, positions: Tensor) -> BatchLoss:
        """Return the sum over targets of cross-entropy and weighted divergence, in nats, by both models.

        Args:
            model: Trained model with a loss head, wrapped or not.
            inputs: Keyword arguments of the model, such as ``input_ids``, ``int64 (B, T)``.
            labels: Unshifted targets, ``int64 (B, T)``, negative where there is no target.
            positions: Indices of the targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``.
        """
        if self.model is not None:
            output = score_beside_teacher(model, self.model, inputs, labels, self._objective, positions)
        else:
            with torch.no_grad(), adapters_off(extract_model_from_parallel(model)):
                # Hidden states (N, H) instead of logits (N, V): the head computes these in chunks.
                states = model(**inputs, head=lambda hidden, *_, **__: pick_predictors(hidden, positions)).result
            # The output projection has no adapter, so it equals the base's.
            output = score_beside_record(model, states, inputs, labels, self._objective, positions)
        sums: DistillationSums = output.result
        loss_sum, figures = sums.loss_sum * self._scale, {KL_TO_BASE: sums.divergence_sum}
        return BatchLoss(loss_sum, sums.num_targets, sums.num_targets, sums.num_correct, output.aux_loss, figures)


def load_base(config: RecipeConfig, attn_implementation: str) -> BaseDivergence | None:
    """Load the base of a run; ``None`` if ``kl_to_base`` is 0.

    Args:
        config: Run configuration.
        attn_implementation: Attention implementation of the trained model, since the base gets the same batches.

    Raises:
        ConfigError: The model cannot be loaded (``load_causal_lm``).
    """
    coefficient = config.forgetting.kl_to_base
    if not coefficient:
        return None
    base = None if config.adapter.use_peft else freeze(load_causal_lm(config.model, attn_implementation))
    return BaseDivergence(coefficient, base)


class SFTTrainer(NextTokenTrainer):
    """``NextTokenTrainer`` for prepared rows, with an optional adapter and KL penalty to the initial model.

    Source: ``trl.SFTTrainer``; losses and gradient norms are equal on the same chats
    (``tests/parity/test_trl_preparation.py``).
    """

    balances_experts = True

    def __init__(self, *, base: BaseDivergence | None = None, **kwargs: Any) -> None:
        """Initialise the trainer.

        Args:
            base: KL divergence to the initial model, added to the loss; ``None`` without ``kl_to_base``.
            **kwargs: As ``NextTokenTrainer``.
        """
        super().__init__(**kwargs)
        self.base = base
        if base is not None and base.model is not None:
            # Sharded like the trained model, with the same compute dtype.
            base.model = prepare_frozen(self.accelerator, base.model)

    def list_frozen(self) -> list[Any]:
        """Return the initial model of ``kl_to_base``, unless it is the trained one without its adapter."""
        return [] if self.base is None or self.base.model is None else [self.base.model]

    def score_batch(self, model: nn.Module, inputs: Batch) -> BatchLoss:
        """Return the loss of ``NextTokenTrainer``, plus the weighted divergence to the base model."""
        if self.base is None:
            return super().score_batch(model, inputs)
        labels, positions = inputs.pop("labels"), inputs.pop(POSITIONS)
        return self.base.score(model, inputs, labels, positions)


class SaveBeforeDecay(TrainerCallback):
    """Saves a checkpoint at the start of the decay, from which a longer run can resume."""

    def __init__(self, step: int) -> None:
        """Save after ``step`` optimizer steps, unless nothing is saved at all."""
        self._step = step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a checkpoint."""
        if state.global_step == self._step and args.save_strategy != SaveStrategy.NO:
            control.should_save = True


class PretrainTrainer(NextTokenTrainer):
    """``NextTokenTrainer`` over pretraining rows in a fixed order."""

    def __init__(self, *, config: RecipeConfig, schedule: Schedule, **kwargs: Any) -> None:
        """Initialise the trainer.

        Args:
            config: The run: ``optim``, which may be a name that upstream's arguments reject, ``model_config`` and
                ``decay_embeddings``.
            schedule: Learning rate of each step as a fraction of the peak.
            **kwargs: As ``NextTokenTrainer``; ``train_dataset`` holds all rows of the run in training order.
        """
        self.schedule = schedule
        self.is_from_scratch = config.model.model_config is not None
        self.decay_embeddings = config.pretraining.decay_embeddings
        args, optim = kwargs["args"], config.training.get("optim")
        if optim == STOCHASTIC_ADAMW:
            options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            kwargs["optimizer_cls_and_kwargs"] = (StochasticAdamW, options)
        elif optim == "muon":
            # An optimizer factory of upstream: it returns the function that gets the model and these options.
            options = {"args": args, "decay_embeddings": self.decay_embeddings}
            kwargs["optimizer_cls_and_kwargs"] = (lambda: build_muon, options)
        super().__init__(**kwargs)
        # DeepSpeed updates the weights before the monitor's callback runs, and under ZeRO-3 they are sharded.
        if not self.is_deepspeed_enabled:
            self.add_figures(WeightMonitor(self.measure_norm, self.list_counted))
        if schedule.first_decay_step is not None:
            self.add_figures(SaveBeforeDecay(schedule.first_decay_step))

    def list_protected_steps(self) -> set[int]:
        """Return the steps whose checkpoints are never deleted: from the start of the decay a longer run can resume."""
        first_decay_step = self.schedule.first_decay_step
        return super().list_protected_steps() | (set() if first_decay_step is None else {first_decay_step})

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the half-open range of rows of the run that step ``step`` (from 0) takes over all ranks."""
        rows: TokenDataset = self.train_dataset  # type: ignore[assignment]
        return rows.find_rows(step)

    def verify_first_loss(self, loss: float) -> None:
        """Compare the loss of a model with random weights with its expected value."""
        if self.is_from_scratch:
            self.observer.progress.say(verify_initial_loss(self.model, loss, self.guard.inputs.batches))

    def build_sampler(self) -> Sampler[int]:
        """Build the sampler of rows in order, without those skipped by rollbacks."""
        rows: Any = self.train_dataset
        # After a rollback, upstream builds the loader again, so this reads the current skips.
        rows.skips = find_skips(self.guard.rollbacks)
        return SequentialSampler(rows)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the scheduler of ``schedule``, in place of upstream's ``lr_scheduler_type``."""
        if self.lr_scheduler is None:
            scheduled = self.optimizer if optimizer is None else optimizer
            assert scheduled is not None
            # ``LambdaLR`` does not save plain functions: a run extended to more steps resumes with its own schedule.
            self.lr_scheduler = LambdaLR(scheduled, lambda step: self.schedule(step))
            self._created_lr_scheduler = True
        # Returns this one, once the sharding of the model is over.
        return super().create_scheduler(num_training_steps, optimizer)

"""Direct preference optimisation: the trainer, and the reference that it holds the policy against."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.pair_data import PairData, PairRows
from recipes_lib.data.prepare import find_root
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.heads import add_loss_head
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.arguments import get_compute_dtype
from recipes_lib.training.launch import Launch
from recipes_lib.training.pair_attention import PairAttention
from recipes_lib.training.pair_batches import Batch, PairScores, compute_answer_logps
from recipes_lib.training.pair_trainer import PairTrainer
from recipes_lib.training.preference import PreferenceObjective, verify_first_scores
from recipes_lib.training.reference import StoredReference, compute_reference_key, refuse_missing

logger = logging.getLogger(__name__)

MAX_DIFFERENCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""By how much a stored log-probability may differ from a new one, in nats a token, by the precision of the products."""
MAX_DROP: Final = 0.5
"""How far the chosen answers may lose likelihood before it is told, in nats a token."""


class DPOTrainer(PairTrainer):
    """``PairTrainer`` with the losses of ``PreferenceObjective``.

    Source: ``trl.DPOTrainer``, whose losses and gradient norms it has on the same pairs; ``tests/parity/test_dpo.py``.
    """

    def __init__(
        self, *, objective: PreferenceObjective, stored: StoredReference | None, is_own_reference: bool, **kwargs: Any
    ) -> None:
        """Put the loss head on the model and set the trainer up.

        Args:
            objective: The losses, and the reference unless it is ``stored``.
            stored: Numbers of the reference, read or computed before the first step.
            is_own_reference: Whether the reference is the model that training starts from.
            **kwargs: As ``PairTrainer``; ``train_dataset`` holds the reference's numbers where they are ``stored``.
        """
        self.objective: PreferenceObjective = objective
        self.stored: StoredReference | None = stored
        self._mean_chosen_tokens: torch.Tensor | None = None
        args = kwargs["args"]
        # With dropout on, the policy is not its own reference.
        self._has_first_scores = not (is_own_reference and objective.needs_reference and args.disable_dropout)
        super().__init__(**kwargs)
        self.router_aux_loss_coef = getattr(self.model.config, "router_aux_loss_coef", 0.0)
        add_loss_head(self.model)
        if objective.reference is not None:
            # Its products in the policy's precision, or the two would differ before the first step.
            objective.reference = self.accelerator.prepare_model(objective.reference, evaluation_mode=True)
        self.add_callback(_Begin(self))
        self.add_callback(_WatchChosen())

    def get_batch_samples(self, *args: Any) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Take the micro-batches of a step; ``sft`` is a mean over the tokens of all of them."""
        batches, num_pairs = super().get_batch_samples(*args)
        if batches and "sft" in self.objective.names:
            tokens = torch.stack([batch["num_completion_tokens"][0::2].sum() for batch in batches]).sum()
            total = self.accelerator.reduce(tokens.to(self.args.device), reduction="sum")
            self._mean_chosen_tokens = total / num_pairs
        return batches, num_pairs

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch; the first one of a run must show that the policy is its own reference."""
        scores = self.objective.score(model, batch, self._mean_chosen_tokens)
        if not self._has_first_scores:
            self.observer.progress.say(verify_first_scores(self.objective, scores, get_compute_dtype(self.args)))
            self._has_first_scores = True
        return scores

    def begin(self, step: int) -> None:
        """Read the reference's numbers, or compute them; after ``step`` steps nothing is left to compute them from.

        Raises:
            ConfigError: The run goes on and they are gone.
            DataError: They cannot be stored.
        """
        self._has_first_scores = self._has_first_scores or step > 0
        if self.stored is None:
            return
        model, batch_size = self.model_wrapped, self.args.per_device_eval_batch_size

        reference: nn.Module = model if self.objective.reference is None else self.objective.reference

        def score(rows: Sequence[Any]) -> torch.Tensor:
            return compute_answer_logps(reference, self.data_collator(list(rows)), ld_alpha=self.objective.ld_alpha)

        is_found = self.stored.find()
        if step:
            if not is_found:
                refuse_missing(step)
        else:
            limit = MAX_DIFFERENCE[get_compute_dtype(self.args)]
            if is_found:
                difference = self.stored.find_largest_difference(reference, score, batch_size=batch_size)
                is_found = difference <= limit
                verdict = "are used" if is_found else "are computed again"
                self.observer.progress.say(
                    f"reference: stored numbers are off by {difference:.1e} nats a token at most; they {verdict}"
                )
            if not is_found:
                progress = self.observer.progress
                self.stored.compute(reference, score, batch_size=batch_size, progress=progress)
                if self.args.process_index == 0:
                    self.stored.store()
        # What is stored takes no memory while training.
        self.objective.reference = None


class _Begin(TrainerCallback):
    """Calls ``DPOTrainer.begin`` once the model is wrapped and a checkpoint is read."""

    def __init__(self, trainer: DPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.begin(state.global_step)


class _WatchChosen(TrainerCallback):
    """Tells, once, that the chosen answers are becoming much less likely."""

    _is_told = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shift = (logs or {}).get("logps/chosen_shift", 0.0)
        if shift < -MAX_DROP and not self._is_told:
            self._is_told = True
            logger.warning(
                "step %d: chosen answers have lost %.2f nats a token since the start, rejected ones more: likelihood "
                "moves to answers that nobody wrote. Add `sft` to loss_type, use apo_zero, or lower learning_rate",
                state.global_step,
                -shift,
            )


def prepare_reference(
    config: RecipeConfig,
    objective: PreferenceObjective,
    data: PairData,
    model: PreTrainedModel,
    attention: PairAttention,
    args: TrainingArguments,
    launch: Launch,
) -> StoredReference | None:
    """Settle what the policy is held against: stored numbers, a frozen copy, or the policy without its adapter.

    A reference of its own, and a frozen copy of the model, go into ``objective.reference``.

    Args:
        config: The run.
        objective: Its losses.
        data: Its pairs.
        model: The policy at its start, not yet wrapped.
        attention: Kernel and layout.
        args: Precision and output directory.
        launch: How the processes were started.

    Returns:
        The numbers that ``precompute_ref_log_probs`` asks for, not read or computed yet; or ``None``.

    Raises:
        ConfigError: A frozen copy would be kept whole beside a sharded policy.
    """
    if not objective.needs_reference:
        return None
    if config.preference.ref_model_name_or_path is not None:
        objective.reference = _load_reference(config, attention)
    is_stored = bool(getattr(args, "precompute_ref_log_probs", False))
    has_fresh_adapter = config.adapter.use_peft and config.adapter.adapter_name_or_path is None
    if not is_stored and objective.reference is None and not has_fresh_adapter:
        if launch.engine:
            where = config.provenance.get("precompute_ref_log_probs", "precompute_ref_log_probs")
            found = f"a frozen copy would be kept whole on every process beside the policy that {launch.engine} shards"
            raise ConfigError(Problem(where, found, "write `precompute_ref_log_probs: true`"))
        objective.reference = _freeze(copy.deepcopy(model))
    if not is_stored:
        return None
    rows: dict[str, PairRows] = {"train": data.train} | ({} if data.eval is None else {"eval": data.eval})
    key = compute_reference_key(
        model if objective.reference is None else objective.reference,
        pairs=data.record["key"],
        dtype=str(get_compute_dtype(args)),
        attention=attention.implementation,
        layout=attention.layout,
        ld_alpha=objective.ld_alpha,
    )
    return StoredReference(key, rows, root=find_root(config), output_dir=Path(str(args.output_dir)))


def _load_reference(config: RecipeConfig, attention: PairAttention) -> PreTrainedModel:
    chosen = replace(
        config.model,
        model_name_or_path=config.preference.ref_model_name_or_path,
        model_revision=config.preference.ref_model_revision,
    )
    return _freeze(load_causal_lm(chosen, attention.implementation))


def _freeze(model: PreTrainedModel) -> PreTrainedModel:
    add_loss_head(model)
    model.requires_grad_(False)
    model.train(False)
    return model

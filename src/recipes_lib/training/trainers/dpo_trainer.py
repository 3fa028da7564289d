"""Direct preference optimisation: the trainer, and the reference that it holds the policy against."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.prepared_set import find_root
from recipes_lib.data.pairs.pair_data import PairData, PairRows
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.preference import COMPARING
from recipes_lib.models.adapters.lora import is_taken_out_of_weights
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.layouts.fsdp import prepare_frozen
from recipes_lib.training.trainers.arguments import get_compute_dtype, get_rounding_dtype
from recipes_lib.training.trainers.pair_batches import (
    Batch,
    PairAttention,
    PairScores,
    compute_answer_logps,
    count_pairs,
    prove_pair_attention,
)
from recipes_lib.training.trainers.pair_trainer import PairTrainer
from recipes_lib.training.trainers.preference_objective import PreferenceObjective, verify_first_scores
from recipes_lib.training.trainers.reference import StoredReference, compute_reference_key, refuse_missing

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
        self._has_numbers = False
        self._mean_chosen_tokens: torch.Tensor | None = None
        args = kwargs["args"]
        # With dropout on, the policy is not its own reference.
        self._has_first_scores = not (is_own_reference and objective.needs_reference and args.disable_dropout)
        super().__init__(**kwargs)
        self.compares_rows = not COMPARING.isdisjoint(objective.names)
        add_loss_head(self.model)
        verify_loss_head(self.model)
        if objective.reference is not None:
            # Its products in the policy's precision, or the two would differ before the first step.
            objective.reference = prepare_frozen(self.accelerator, objective.reference)
        self.add_callback(_Begin(self))
        self.add_callback(_WatchChosen(self.observer.progress.say))

    def get_batch_samples(self, *args: Any) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Take the micro-batches of a step; ``sft`` is a mean over the tokens of all of them."""
        batches, num_pairs = super().get_batch_samples(*args)
        if batches and "sft" in self.objective.names:
            chosen = torch.cat([batch["num_completion_tokens"][0::2][: count_pairs(batch)] for batch in batches])
            total = self.accelerator.reduce(chosen.sum().to(self.args.device), reduction="sum")
            self._mean_chosen_tokens = total / num_pairs
        return batches, num_pairs

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch; the first one of a run must show that the policy is its own reference."""
        scores = self.objective.score(model, batch, self._mean_chosen_tokens)
        if not self._has_first_scores:
            dtype = get_rounding_dtype(self.model, self.args)
            self.observer.progress.say(verify_first_scores(self.objective, scores, batch, dtype))
            self._has_first_scores = True
        return scores

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """While it lasts, what is computed does not count as training, nor as the first step."""
        has_first_scores, self._has_first_scores = self._has_first_scores, True
        try:
            with super().rehearsal():
                yield
        finally:
            self._has_first_scores = has_first_scores

    def begin(self, step: int) -> None:
        """Read the reference's numbers, or compute them; after ``step`` steps nothing is left to compute them from.

        Raises:
            ConfigError: The run goes on and they are gone.
            DataError: They cannot be stored.
        """
        self._has_first_scores = self._has_first_scores or step > 0
        # Behind a spike training begins again in this process, where the reference is gone and its numbers are there.
        if self.stored is None or self._has_numbers:
            return
        if step == 0:
            self._settle(self.stored)
        elif not self.stored.find():
            refuse_missing(step)
        self._has_numbers = True
        if self.objective.reference is not None:
            # What is stored takes no memory while training. A model with a head on it refers to itself.
            self.objective.reference = None
            gc.collect()

    def _settle(self, stored: StoredReference) -> None:
        reference: nn.Module = self.model_wrapped if self.objective.reference is None else self.objective.reference

        def score(rows: Sequence[Any]) -> torch.Tensor:
            return compute_answer_logps(reference, self.data_collator(list(rows)), ld_alpha=self.objective.ld_alpha)

        stored.settle(
            reference,
            score,
            batch_size=self.args.per_device_eval_batch_size,
            dtype=get_rounding_dtype(self.model, self.args),
            progress=self.observer.progress,
        )


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

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_told = False

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
            self._say(
                f"step {state.global_step}: chosen answers have lost {-shift:.2f} nats a token since the start; "
                "likelihood moves to answers that nobody wrote: add `sft` to loss_type, use apo_zero, or lower "
                "learning_rate"
            )


def prepare_reference(
    config: RecipeConfig,
    objective: PreferenceObjective,
    data: PairData,
    model: PreTrainedModel,
    attention: PairAttention,
    args: TrainingArguments,
) -> tuple[StoredReference | None, PairData]:
    """Settle what the policy is held against: stored numbers, a frozen copy, or the policy without its adapter.

    A model of its own, and a frozen copy of the policy, go into ``objective.reference``.

    Args:
        config: The run.
        objective: Its losses.
        data: Its pairs.
        model: The policy at its start, not yet wrapped.
        attention: Kernel and layout.
        args: Precision and output directory.

    Returns:
        The numbers that ``precompute_ref_log_probs`` asks for, not read or computed yet, or ``None``; and the pairs,
        with the numbers that they will have.

    Raises:
        ConfigError: The model of ``ref_model_name_or_path`` cannot be the reference of this policy.
    """
    if not objective.needs_reference:
        return None, data
    is_stored = bool(getattr(args, "precompute_ref_log_probs", False))
    # A fresh adapter changes nothing yet, unless it began with a part of the model's own weights.
    has_base = (
        config.adapter.use_peft
        and config.adapter.adapter_name_or_path is None
        and not is_taken_out_of_weights(cast(Any, model))
    )
    if config.preference.ref_model_name_or_path is not None:
        objective.reference = _load_reference(config, attention, model, max_length=data.max_length)
    elif not is_stored and not has_base:
        objective.reference = _freeze(copy.deepcopy(model))
    if not is_stored:
        return None, data
    rows: dict[str, PairRows] = {"train": data.train} | ({} if data.eval is None else {"eval": data.eval})
    key = compute_reference_key(
        model if objective.reference is None else objective.reference,
        is_without_adapter=has_base and objective.reference is None,
        pairs=data.record["key"],
        dtype=str(get_compute_dtype(args)),
        attention=attention.implementation,
        layout=attention.layout,
        ld_alpha=objective.ld_alpha,
    )
    stored = StoredReference(key, rows, root=find_root(config), output_dir=Path(str(args.output_dir)))
    return stored, stored.attach(data)


def _load_reference(
    config: RecipeConfig, attention: PairAttention, policy: PreTrainedModel, *, max_length: int
) -> PreTrainedModel:
    """The model of ``ref_model_name_or_path``, proved to say of a pair what it says of each answer alone.

    Raises:
        ConfigError: It cannot be loaded, has another vocabulary than the policy, or cannot take the layout.
    """
    name, revision = config.preference.ref_model_name_or_path, config.preference.ref_model_revision
    where = config.provenance.get("ref_model_name_or_path", "ref_model_name_or_path")
    try:
        chosen = replace(config.model, model_name_or_path=name, model_revision=revision)
        reference = load_causal_lm(chosen, attention.implementation)
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    sizes = [model.config.get_text_config().vocab_size for model in (reference, policy)]
    if sizes[0] != sizes[1]:
        found = f"{name} has {sizes[0]:,} tokens and the policy {sizes[1]:,}: they do not read the same text"
        raise ConfigError(Problem(where, found, "name a model with the tokenizer of the policy"))
    settled = prove_pair_attention(config, attention, reference, max_length=max_length)
    if (settled.layout, settled.packing) != (attention.layout, attention.packing):
        found = f"{name} cannot take pairs laid out as the policy can: {settled.reason}"
        raise ConfigError(Problem(where, found, "write `shared_prompt: false`, or name another model"))
    return _freeze(reference)


def _freeze(model: PreTrainedModel) -> PreTrainedModel:
    add_loss_head(model)
    model.requires_grad_(False)
    model.train(False)
    return model

"""Direct preference optimisation: objective, trainer and reference model."""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from trl import DPOConfig

from recipes_lib.config.schema import ModelConfig, PreferenceConfig, RecipeConfig
from recipes_lib.data.pairs.preference_sets import PairData
from recipes_lib.data.store import Rows, find_root
from recipes_lib.errors import ConfigError, DivergedError, Problem, reported_at
from recipes_lib.losses import preference
from recipes_lib.models.adapters.lora import adapters_off, has_changed_base
from recipes_lib.models.architecture import find_other_vocabulary
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.inference import find_device, preserve_training_state
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.layouts.fsdp import prepare_frozen
from recipes_lib.training.trainers.arguments import get_compute_dtype, get_rounding_dtype
from recipes_lib.training.trainers.pair_batches import (
    Batch,
    PairScores,
    compute_answer_logps,
    count_pairs,
    measure_answer_rounding,
    read_inputs,
    split_sequences,
)
from recipes_lib.training.trainers.pair_trainer import PairAttention, PairTrainer, verify_pair_attention
from recipes_lib.training.trainers.reference import REFERENCE_FOLDER, ReferenceLogps, compute_reference_key
from recipes_lib.training.trainers.trained_model import freeze

LN2_TOLERANCE: Final = 1e-4
"""Absolute tolerance of the first loss around ln 2."""


@dataclass(slots=True)
class PreferenceObjective:
    """Weighted sum of the losses of ``loss_type``, with the source of reference log-probabilities.

    Reference log-probabilities come from the batch (``ref_chosen_logp``, ``ref_rejected_logp``) if it has them, else
    from ``reference``, else from the policy with its adapter disabled.

    Attributes:
        names: Losses to add.
        weights: Weight of each loss.
        options: Hyperparameters of the losses.
        ld_alpha: Weight of the tokens by which one answer is longer than the other (LD-DPO); ``None``: 1.
        use_weighting: Whether pairs are weighted by their likelihood under the policy (WPO).
        mean_held_out_tokens: Mean tokens of a held-out chosen answer, which normalises ``sft`` in evaluation.
        reference: Frozen reference model with a loss head; neither trained nor saved.
    """

    names: Sequence[str]
    weights: Sequence[float]
    options: preference.PreferenceOptions
    ld_alpha: float | None
    use_weighting: bool
    mean_held_out_tokens: Tensor | None = None
    reference: nn.Module | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses compares the policy with a reference."""
        return not set(self.names) <= preference.REFERENCE_FREE

    def score(self, model: nn.Module, batch: Batch, mean_chosen_tokens: Tensor | None = None) -> PairScores:
        """Score a batch of pairs.

        Args:
            model: The policy, with a loss head.
            batch: From ``PairCollator``; ``P`` pairs.
            mean_chosen_tokens: Mean tokens of a chosen answer over the optimizer step, the normaliser of ``sft``;
                ``None`` for held-out pairs: the mean over all of them.
        """
        device = find_device(model)
        outputs = model(
            **read_inputs(model, batch),
            predictors=batch["predictors"].to(device),
            targets=batch["targets"].to(device),
            token_logps=True,
            with_statistics=self.use_weighting,
        )
        # Answer of each target token, chosen answers first: outputs.logps and ids are (N,), sums over answers (2P,).
        ids, num_chosen, num_rejected = split_sequences(batch, device)
        num_pairs = len(num_chosen)
        chosen, rejected = preference.sum_logps(outputs.logps, ids, 2 * num_pairs, ld_alpha=self.ld_alpha).view(2, -1)
        ref_chosen, ref_rejected = self._read_reference(model, batch, device)
        pairs = preference.PreferenceBatch(
            chosen_logps=chosen,
            rejected_logps=rejected,
            num_chosen_tokens=num_chosen,
            num_rejected_tokens=num_rejected,
            ref_chosen_logps=ref_chosen,
            ref_rejected_logps=ref_rejected,
            chosen_nll=-preference.sum_logps(outputs.logps, ids, 2 * num_pairs)[:num_pairs]
            if self.ld_alpha is not None
            else None,
            mean_chosen_tokens=self.mean_held_out_tokens if mean_chosen_tokens is None else mean_chosen_tokens,
            weights=(
                preference.compute_wpo_weights(outputs.logps, outputs.log_sum_sq_probs, ids, 2 * num_pairs)
                if self.use_weighting
                else None
            ),
        )
        figures = preference.compute_preference_metrics(pairs, self.options.beta)
        if ref_chosen is not None:
            figures["logps/chosen_shift"] = (chosen.detach() - ref_chosen) / num_chosen
        return PairScores(
            losses=preference.compute_preference_losses(self.names, self.weights, pairs, self.options),
            figures=figures,
            num_targets=num_chosen.sum(),
            num_correct=(outputs.is_top & (ids < num_pairs)).sum(),
            aux_loss=outputs.aux_loss,
        )

    def _read_reference(
        self, model: nn.Module, batch: Batch, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self.needs_reference:
            return None, None
        if "ref_chosen_logp" in batch:
            return batch["ref_chosen_logp"].to(device), batch["ref_rejected_logp"].to(device)
        reference = model if self.reference is None else self.reference
        disabled = adapters_off(extract_model_from_parallel(model)) if reference is model else nullcontext()
        with torch.no_grad(), disabled:
            chosen, rejected = compute_answer_logps(reference, batch, ld_alpha=self.ld_alpha)
        return chosen, rejected


def build_objective(
    args: DPOConfig, config: PreferenceConfig, record: Mapping[str, Any] = MappingProxyType({})
) -> PreferenceObjective:
    """Build the objective of a run, without a reference model.

    Args:
        args: Keys of TRL's ``DPOConfig``.
        config: Keys of this library.
        record: Record of the run's pairs, with the statistics of the held-out ones; of ``eval_datasets`` if it has no
            held-out pairs of its own.
    """
    options = preference.PreferenceOptions(
        beta=args.beta,
        label_smoothing=config.label_smoothing,
        f_divergence_type=getattr(args.f_divergence_type, "value", args.f_divergence_type),
        f_alpha_divergence_coef=args.f_alpha_divergence_coef,
        discopop_tau=args.discopop_tau,
        simpo_gamma=config.simpo_gamma,
    )
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    held_out = [record["eval"]] if "eval" in record else list(record.get("eval_datasets", {}).values())
    num_tokens, num_pairs = (sum(each[name] for each in held_out) for name in ("num_chosen_tokens", "num_pairs"))
    mean = torch.tensor(num_tokens / num_pairs) if held_out else None
    return PreferenceObjective(list(args.loss_type), weights, options, args.ld_alpha, args.use_weighting, mean)


def verify_first_scores(objective: PreferenceObjective, scores: PairScores, batch: Batch, allowed: Tensor) -> str:
    """Verify the first step, where the policy equals its reference and all log-ratios are 0 up to rounding.

    Args:
        objective: The objective of the run.
        scores: Scores of the first batch, before any update.
        batch: The first batch.
        allowed: Rounding errors of the answers, chosen ones before rejected ones, ``float32 (2, P)``.

    Returns:
        A line for the log.

    Raises:
        DivergedError: A log-ratio exceeds the rounding error, or the loss of ``sigmoid`` is not ln 2.
    """
    beta, loss = objective.options.beta, float(scores.losses.detach().mean())
    rewards = torch.stack([scores.figures["rewards/chosen"], scores.figures["rewards/rejected"]]).flatten()
    # Chosen and rejected answers alternate.
    lengths, allowed = batch["num_completion_tokens"].view(-1, 2).T.flatten(), allowed.flatten()
    # argmax returns the index of a NaN if there is one.
    worst = int((rewards.abs() / allowed).argmax())
    shift, rounding = float(rewards[worst]) / beta, float(allowed[worst])
    is_sigmoid = list(objective.names) == ["sigmoid"] and objective.weights[0] == 1 and not objective.use_weighting
    tolerance = max(LN2_TOLERANCE, beta * float(allowed.max()))
    if not abs(shift) <= rounding or (is_sigmoid and not abs(loss - math.log(2)) <= tolerance):
        raise DivergedError(
            f"before the first update the loss is {loss:.6f}, and an answer of {int(lengths[worst])} tokens has a "
            f"log-probability that is off by {shift:.2g} from that of the reference, which should be the same model: "
            f"rounding explains {rounding:.1g}"
            + (f", and a loss of ln 2 = {math.log(2):.6f} within {tolerance:.1g}" if is_sigmoid else "")
            + ". Policy and reference differ, or dropout or router noise is on"
        )
    return f"step 0: loss {loss:.6f}, largest log-ratio {abs(shift):.1e} nats: policy and reference agree"


MAX_DROP: Final = 0.5
"""Drop in log-probability of the chosen answers, in nats per token, above which a warning is logged."""


class DPOTrainer(PairTrainer):
    """``PairTrainer`` with the losses of ``PreferenceObjective``.

    Source: ``trl.DPOTrainer``; losses and gradient norms are equal on the same pairs (``tests/parity/test_dpo.py``).
    """

    def __init__(
        self, *, objective: PreferenceObjective, stored: ReferenceLogps | None, is_own_reference: bool, **kwargs: Any
    ) -> None:
        """Attach the loss head to the model and initialise the trainer.

        Args:
            objective: The losses, and the reference model if its log-probabilities are not ``stored``.
            stored: Reference log-probabilities of all pairs, loaded or computed before the first step.
            is_own_reference: Whether the reference is the policy at its start.
            **kwargs: As ``PairTrainer``; with ``stored``, ``train_dataset`` comes from ``ReferenceLogps.attach``.
        """
        self.objective: PreferenceObjective = objective
        self.stored: ReferenceLogps | None = stored
        self._has_logps = False
        self._mean_chosen_tokens: torch.Tensor | None = None
        args = kwargs["args"]
        # With dropout, the first log-ratios are not 0: the check is skipped.
        self._has_first_scores = not (is_own_reference and objective.needs_reference and args.disable_dropout)
        super().__init__(score=self._score, **kwargs)
        self.compares_rows = not preference.COMPARING.isdisjoint(objective.names)
        add_loss_head(self.model)
        verify_loss_head(self.model)
        if objective.reference is not None:
            # With the policy's compute dtype: otherwise both would differ before the first step.
            objective.reference = prepare_frozen(self.accelerator, objective.reference)
        self.add_callback(_PrepareReference(self))
        # Another reference may give chosen answers a higher likelihood from the beginning.
        if is_own_reference:
            self.add_callback(_WarnOnChosenLikelihood(self.observer.progress.say))

    def list_frozen(self) -> list[Any]:
        """Return the reference model, unless its log-probabilities are read from files or from the policy."""
        return [] if self.objective.reference is None else [self.objective.reference]

    def get_batch_samples(self, *args: Any) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Take the micro-batches of a step, and compute the normaliser of ``sft`` over all of them."""
        batches, num_pairs = super().get_batch_samples(*args)
        if batches and "sft" in self.objective.names:
            chosen = torch.cat([batch["num_completion_tokens"][0::2][: count_pairs(batch)] for batch in batches])
            total = self.accelerator.reduce(chosen.sum().to(self.args.device), reduction="sum")
            # Over the whole step: the mean over its pairs is then nats per token for any gradient accumulation.
            self._mean_chosen_tokens = total / num_pairs
        return batches, num_pairs

    def _score(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch of pairs; verify with the first one of a run that the policy equals its reference."""
        # Before the scores, because their activations stay in memory until the backward pass.
        rounding = None if self._has_first_scores else self._measure(model, batch)
        scores = self.objective.score(model, batch, self._mean_chosen_tokens)
        if rounding is not None:
            self.observer.progress.say(verify_first_scores(self.objective, scores, batch, rounding))
            self._has_first_scores = True
        return scores

    def _measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the rounding errors of the answers of a batch, ``float32 (2, P)``."""
        score = functools.partial(compute_answer_logps, model, batch, ld_alpha=self.objective.ld_alpha)
        lengths, dtype = batch["num_completion_tokens"].view(-1, 2).T, get_rounding_dtype(self.model, self.args)
        with preserve_training_state(model):
            return measure_answer_rounding(model, score, score(), lengths, dtype)

    def build_stand_ins(self) -> dict[str, Any]:
        """Return those of ``PairTrainer``, and skip ``verify_first_scores`` in an uncounted pass."""
        return super().build_stand_ins() | {"_has_first_scores": True}

    def begin(self, step: int) -> None:
        """Load the reference log-probabilities, or compute them if ``step`` is 0; all ranks must call.

        Raises:
            ConfigError: The run is resumed and they are missing.
            DataError: They cannot be stored.
        """
        self._has_first_scores = self._has_first_scores or step > 0
        # After a rollback, training begins again in this process, with the log-probabilities and without the model.
        if self.stored is None or self._has_logps:
            return
        if step == 0:
            self._load_or_compute(self.stored)
        elif not self.stored.find(is_resumed=True):
            found = f"the reference log-probabilities are missing, and the weights of step {step} cannot compute them"
            remedy = "restore the folder, or start again in a new output_dir"
            raise ConfigError(Problem(REFERENCE_FOLDER, found, remedy))
        self._has_logps = True
        if self.objective.reference is not None:
            # Frees the reference's memory; the loss head's reference cycle needs the garbage collector.
            self.objective.reference = None
            gc.collect()

    def _load_or_compute(self, stored: ReferenceLogps) -> None:
        reference: nn.Module = self.model_wrapped if self.objective.reference is None else self.objective.reference
        ld_alpha = self.objective.ld_alpha
        stored.load_or_compute(
            reference,
            lambda rows: compute_answer_logps(reference, self.data_collator(list(rows)), ld_alpha=ld_alpha),
            batch_size=self.args.per_device_eval_batch_size,
            dtype=get_rounding_dtype(self.model, self.args),
            progress=self.observer.progress,
        )


class _PrepareReference(TrainerCallback):
    """Calls ``DPOTrainer.begin`` once the model is wrapped and a checkpoint is read."""

    def __init__(self, trainer: DPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._trainer.begin(state.global_step)


class _WarnOnChosenLikelihood(TrainerCallback):
    """Warns once if the chosen answers become much less likely."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._has_warned = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shift = (logs or {}).get("logps/chosen_shift", 0.0)
        if shift < -MAX_DROP and not self._has_warned:
            self._has_warned = True
            self._say(
                f"step {state.global_step}: the log-probability of chosen answers has dropped by {-shift:.2f} nats per "
                "token: likelihood moves to answers that are in no pair; add `sft` to loss_type, use apo_zero, or "
                "lower learning_rate"
            )


def prepare_reference(
    config: RecipeConfig,
    objective: PreferenceObjective,
    data: PairData,
    model: PreTrainedModel,
    attention: PairAttention,
    args: TrainingArguments,
) -> tuple[ReferenceLogps | None, PairData]:
    """Choose the reference: another model, a frozen copy of the policy, or the policy without its adapter.

    Another model or a frozen copy is set as ``objective.reference``. All ranks must call.

    Args:
        config: The run.
        objective: Its objective; changed in place.
        data: Its pairs.
        model: The policy at its start, not yet wrapped.
        attention: Attention kernel and batch layout.
        args: Compute dtype and output directory.

    Returns:
        With ``precompute_ref_log_probs``, the storage of reference log-probabilities, not loaded or computed yet, else
        ``None``; and the pairs, which return the stored log-probabilities.

    Raises:
        ConfigError: As ``load_causal_lm``, for ``ref_model_name_or_path``.
        ConfigError: The reference has another vocabulary size than the policy, or does not support the batch layout.
    """
    if not objective.needs_reference:
        return None, data
    is_stored = bool(getattr(args, "precompute_ref_log_probs", False))
    # A new adapter is the identity, but PiSSA and OLoRA subtract its product from the base weights.
    has_base = (
        config.adapter.use_peft
        and config.adapter.adapter_name_or_path is None
        and not has_changed_base(cast(Any, model))
    )
    if config.preference.ref_model_name_or_path is not None:
        objective.reference = _load_reference(config, attention, model, max_length=data.max_length)
    elif not is_stored and not has_base:
        objective.reference = freeze(copy.deepcopy(model))
    if not is_stored:
        return None, data
    rows: dict[str, Rows] = {"train": data.train} | ({} if data.eval is None else {"eval": data.eval})
    rows |= {f"eval-{name}": pairs for name, pairs in data.eval_sets.items()}
    keys = [data.record["key"], *(record["key"] for record in data.record.get("eval_datasets", {}).values())]
    key = compute_reference_key(
        model if objective.reference is None else objective.reference,
        is_without_adapter=has_base and objective.reference is None,
        pairs=" ".join(keys),
        dtype=str(get_compute_dtype(args)),
        attention=attention.implementation,
        layout=attention.layout,
        ld_alpha=objective.ld_alpha,
    )
    stored = ReferenceLogps(key, rows, root=find_root(config), output_dir=Path(str(args.output_dir)))
    return stored, stored.attach(data)


def verify_reference(config: RecipeConfig, policy_config: PreTrainedConfig) -> ModelConfig:
    """Return the model of ``ref_model_name_or_path``, verified by its configuration before weights are loaded.

    Raises:
        ConfigError: It cannot be found, or has another vocabulary size than the policy.
    """
    keys = config.preference
    chosen = replace(
        config.model, model_name_or_path=keys.ref_model_name_or_path, model_revision=keys.ref_model_revision
    )
    if found := find_other_vocabulary(chosen, policy_config):
        where = config.locate("ref_model_name_or_path")
        raise ConfigError(Problem(where, found, "name a model with the tokenizer of the policy"))
    return chosen


def _load_reference(
    config: RecipeConfig, attention: PairAttention, policy: PreTrainedModel, *, max_length: int
) -> PreTrainedModel:
    """Load the model of ``ref_model_name_or_path``, and verify that the batch layout isolates answers in it.

    Raises:
        ConfigError: As ``prepare_reference``.
    """
    where = config.locate("ref_model_name_or_path")
    with reported_at(where):
        chosen = verify_reference(config, policy.config)
        reference = load_causal_lm(chosen, attention.implementation)
    settled = verify_pair_attention(config, attention, reference, max_length=max_length)
    if (settled.layout, settled.packing) != (attention.layout, attention.packing):
        name = chosen.model_name_or_path
        found = f"{name} does not support the batch layout of the policy: {settled.reason}"
        raise ConfigError(Problem(where, found, "write `shared_prompt: false`, or name another model"))
    return freeze(reference)

"""The objective of learning from pairs of answers: DPO and its relatives, and the figures that tell how it goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from trl import DPOConfig

from recipes_lib.config.schema import PreferenceConfig
from recipes_lib.errors import ConfigError, DivergedError, Problem
from recipes_lib.losses.preference import (
    REFERENCE_FREE,
    PreferenceBatch,
    PreferenceOptions,
    compute_preference_losses,
    compute_preference_metrics,
    compute_wpo_weights,
    sum_logps,
    verify_preference_options,
)
from recipes_lib.models.adapters.lora import adapters_off
from recipes_lib.models.devices import find_device
from recipes_lib.training.trainers.pair_batches import (
    Batch,
    PairScores,
    compute_answer_logps,
    compute_rounding,
    read_inputs,
    split_sequences,
)

LN2_TOLERANCE: Final = 1e-4
"""By how much the loss of the first step may be off ln 2 in any case."""


@dataclass(slots=True)
class PreferenceObjective:
    """The losses of ``loss_type`` with their options, and what they are held against.

    The reference is what stands in the batch (``ref_chosen_logp``, ``ref_rejected_logp``); without that it is
    ``reference``; without that too, the policy with its adapter off.

    Attributes:
        names: Losses that are added.
        weights: Of each.
        options: What shapes them.
        ld_alpha: Factor on what one answer of a pair is longer than the other.
        use_weighting: Weigh each pair by how likely the policy itself would give its answers.
        mean_held_out_tokens: Tokens of a held-out chosen answer, on average; for ``sft``.
        reference: A frozen model with a loss head; never trained, and no part of what is saved.
    """

    names: Sequence[str]
    weights: Sequence[float]
    options: PreferenceOptions
    ld_alpha: float | None
    use_weighting: bool
    mean_held_out_tokens: float | None = None
    reference: nn.Module | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses is held against a reference."""
        return not set(self.names) <= REFERENCE_FREE

    def score_held_out(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch of held-out pairs, by themselves as if all were one batch; for the rest as ``score``."""
        mean = self.mean_held_out_tokens
        return self.score(model, batch, None if mean is None else torch.tensor(mean))

    def score(self, model: nn.Module, batch: Batch, mean_chosen_tokens: Tensor | None = None) -> PairScores:
        """Score a batch of pairs.

        Args:
            model: The policy, with a loss head on it.
            batch: From ``PairCollator``.
            mean_chosen_tokens: Tokens of a chosen answer, on average over the whole step; for ``sft``.
        """
        device = find_device(model)
        outputs = model(
            **read_inputs(model, batch),
            predictors=batch["predictors"].to(device),
            targets=batch["targets"].to(device),
            token_logps=True,
            with_statistics=self.use_weighting,
        )
        ids, num_chosen, num_rejected = split_sequences(batch, device)
        num_pairs = len(num_chosen)
        chosen, rejected = sum_logps(outputs.logps, ids, 2 * num_pairs, ld_alpha=self.ld_alpha).view(2, -1)
        ref_chosen, ref_rejected = self._read_reference(model, batch, device)
        pairs = PreferenceBatch(
            chosen_logps=chosen,
            rejected_logps=rejected,
            num_chosen_tokens=num_chosen,
            num_rejected_tokens=num_rejected,
            ref_chosen_logps=ref_chosen,
            ref_rejected_logps=ref_rejected,
            chosen_nll=-sum_logps(outputs.logps, ids, 2 * num_pairs)[:num_pairs] if self.ld_alpha is not None else None,
            mean_chosen_tokens=mean_chosen_tokens,
            weights=(
                compute_wpo_weights(outputs.logps, outputs.log_sum_sq_probs, ids, 2 * num_pairs)
                if self.use_weighting
                else None
            ),
        )
        figures = compute_preference_metrics(pairs, self.options.beta)
        if ref_chosen is not None:
            figures["logps/chosen_shift"] = (chosen.detach() - ref_chosen) / num_chosen
        return PairScores(
            losses=compute_preference_losses(self.names, self.weights, pairs, self.options),
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
        with torch.no_grad():
            if self.reference is not None:
                chosen, rejected = compute_answer_logps(self.reference, batch, ld_alpha=self.ld_alpha)
            else:
                with adapters_off(extract_model_from_parallel(model)):
                    chosen, rejected = compute_answer_logps(model, batch, ld_alpha=self.ld_alpha)
        return chosen, rejected


def build_objective(
    args: DPOConfig, config: PreferenceConfig, held_out: Mapping[str, Any] | None = None
) -> PreferenceObjective:
    """Build the objective of a run, as yet without a reference of its own.

    Args:
        args: Upstream's keys, with upstream's defaults.
        config: Ours.
        held_out: Figures of the held-out pairs, as ``PairAudit`` names them.

    Raises:
        ConfigError: The losses cannot be had with these options.
    """
    options = PreferenceOptions(
        beta=args.beta,
        label_smoothing=config.label_smoothing,
        f_divergence_type=getattr(args.f_divergence_type, "value", args.f_divergence_type),
        f_alpha_divergence_coef=args.f_alpha_divergence_coef,
        discopop_tau=args.discopop_tau,
        simpo_gamma=config.simpo_gamma,
    )
    try:
        verify_preference_options(args.loss_type, options, use_weighting=args.use_weighting)
    except ValueError as error:
        raise ConfigError(Problem("loss_type", str(error), "choose values that go together")) from None
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    mean = None if held_out is None else held_out["num_chosen_tokens"] / held_out["num_pairs"]
    return PreferenceObjective(list(args.loss_type), weights, options, args.ld_alpha, args.use_weighting, mean)


def verify_first_scores(objective: PreferenceObjective, scores: PairScores, batch: Batch, dtype: torch.dtype) -> str:
    """Hold the first step against what is known of it: the policy is its own reference, so margins are 0.

    Args:
        objective: Of the run.
        scores: Of the first batch, before any update.
        batch: That batch.
        dtype: Precision of the products.

    Returns:
        What was found, in a line.

    Raises:
        DivergedError: A reward is not 0, or the loss of ``sigmoid`` is not ln 2: policy and reference differ.
    """
    beta, loss = objective.options.beta, float(scores.losses.detach().mean())
    rewards = torch.stack([scores.figures["rewards/chosen"], scores.figures["rewards/rejected"]], dim=1).flatten()
    lengths = batch["num_completion_tokens"].to(rewards.device)
    allowed = compute_rounding(lengths, dtype)
    # What is not a number is the largest of all.
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
            + ". Policy and reference differ, or dropout is on"
        )
    return f"step 0: loss {loss:.6f}, largest log-ratio {abs(shift):.1e} nats: policy and reference agree"

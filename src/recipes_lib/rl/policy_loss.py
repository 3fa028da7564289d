"""Clipped policy and value losses as pure tensor functions of right-padded answers.

Tensors have ``B`` answers of up to ``T`` tokens; ``mask`` is ``bool (B, T)``, True at the tokens of an answer. Values
at other positions are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_IMPORTANCE_WEIGHT: Final = 2.0
"""Default bound of the probability ratio of a token between the policy and the engine that sampled it."""
MAX_LOG_RATIO: Final = 20.0
"""Largest log-ratio that is exponentiated: beyond it only the clip decides, and ``exp`` would overflow."""
MIN_VESPO_LOG_RATIO: Final = -18.420680743952367
"""Smallest log-ratio of an answer in VESPO, the logarithm of 1e-8."""


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Options of the policy objective; names, values and defaults are those of ``grpo`` and so of TRL's ``GRPOConfig``.

    Attributes:
        loss_type: ``grpo``, ``dr_grpo``, ``bnpo``, ``dapo``, ``luspo``: the clipped surrogate, which differ in what
            ``compute_normaliser`` says; ``cispo``, ``sapo``, ``vespo``: surrogates of their own.
        importance_sampling_level: Ratio that is clipped: of a ``token``; of a ``sequence``, the geometric mean of its
            tokens' ratios (GSPO); or of an ``answer``, their product (RLOO, which TRL has in a trainer of its own).
        epsilon: How far below 1 the ratio counts.
        epsilon_high: How far above 1, ``epsilon`` if unset; for ``cispo`` the largest ratio itself.
        delta: Largest ratio at all: bounds the loss of a token with a negative advantage; above ``1 + epsilon_high``.
        beta: KL coefficient: k3 of the reference from the policy, a token, that is added to the loss.
        use_bias_correction_kl: Multiply that KL by the ratio.
        off_policy_mask_threshold: Answers with a negative advantage that the policy finds on average by more nats a
            token less likely than what sampled them teach nothing.
        sapo_temperature_pos: Of the soft clip of ``sapo``, for positive advantages.
        sapo_temperature_neg: For the others.
        vespo_k_pos: Exponent of the weight of ``vespo``, for advantages that are not negative.
        vespo_lambda_pos: Its decay.
        vespo_k_neg: As ``vespo_k_pos``, for negative advantages.
        vespo_lambda_neg: As ``vespo_lambda_pos``, for negative advantages.
        vllm_importance_sampling_correction: Multiply the surrogate by ``compute_importance_weights``, whatever the
            engine.
        vllm_importance_sampling_mode: Of the weights: the ratio of a ``token`` or of the whole ``sequence``, cut off
            at the bounds (``_truncate``) or 0 beyond them (``_mask``).
        vllm_importance_sampling_clip_max: Their upper bound.
        vllm_importance_sampling_clip_min: Their lower bound.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "token_truncate"
    vllm_importance_sampling_clip_max: float | None = MAX_IMPORTANCE_WEIGHT
    vllm_importance_sampling_clip_min: float | None = None

    @property
    def highest(self) -> float:
        """Upper clip range of the ratio, above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def compute_importance_weights(logps: Tensor, engine_logps: Tensor, mask: Tensor, objective: PolicyObjective) -> Tensor:
    """Importance weight of each token, policy over engine probability; ``(B, T)``, no gradient, 0 outside the answers.

    Args:
        logps: By the training graph, ``(B, T)``.
        engine_logps: Of the engine that sampled.
        mask: As everywhere.
        objective: Level and bounds.

    Source: truncated importance sampling, Yao et al. 2025; TRL's ``vllm_importance_sampling_mode``.
    """
    level, _, treatment = objective.vllm_importance_sampling_mode.partition("_")
    # Detached: the weight is a constant of the sample, not a way to lower the loss.
    log_ratio = torch.where(mask, logps - engine_logps, 0.0).detach()
    if not objective.vllm_importance_sampling_correction:
        log_ratio = torch.zeros_like(log_ratio)
    elif level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    lowest, highest = objective.vllm_importance_sampling_clip_min, objective.vllm_importance_sampling_clip_max
    bounded = ratio.clamp(lowest or 0.0, math.inf if highest is None else highest)
    if treatment == "mask":
        # Exactly equal where nothing was cut off.
        bounded = torch.where(bounded == ratio, ratio, 0.0)
    return torch.where(mask, bounded, 0.0)


def compute_normaliser(
    loss_type: str, *, num_answers: int, num_tokens: int, mean_tokens: float, max_length: int
) -> float:
    """Divisor of the summed losses of an optimizer step, over all its micro-batches and processes.

    Args:
        loss_type: As in ``PolicyObjective``.
        num_answers: Of the step.
        num_tokens: Of the step's answers.
        mean_tokens: The same on average over the steps of a generation, which then all have one divisor, as in TRL.
        max_length: Longest answer that the run allows.
    """
    if loss_type == "dr_grpo":
        return num_answers * max_length
    if loss_type in ("grpo", "sapo", "luspo"):
        return num_answers
    return max(mean_tokens if loss_type in ("dapo", "cispo", "vespo") else num_tokens, 1.0)


Terms = dict[str, Tensor]
"""Figures of a minibatch or a part of it by name, scalars without a gradient: sums over tokens, or maxima."""
RATIO_MAX: Final = "ratio_max"
"""The figure that is a maximum: the largest distance of a token's ratio from 1, added to 1."""


def compute_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: PolicyObjective,
    *,
    normaliser: float,
    engine_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> tuple[Tensor, Terms]:
    """Policy loss; for PPO ``max(-A r, -A clip(r, 1 - c, 1 + c))``, averaged over the tokens of a step.

    Args:
        logps: Of the policy, differentiable, ``(B, T)``.
        old_logps: Of the policy that answered.
        advantages: ``(B, T)``, or ``(B, 1)`` of whole answers.
        mask: As everywhere.
        objective: Which loss.
        normaliser: From ``compute_normaliser``, for the whole optimizer step.
        engine_logps: Of the engine that sampled, for ``compute_importance_weights``, at whose 0 a token teaches nothing
            but counts, and for ``off_policy_mask_threshold``; ``None``: ``old_logps``.
        ref_logps: Of the reference; needed where ``beta`` is not 0.

    Returns:
        The sum of the losses divided by the normaliser, a differentiable scalar; and figures: ``approx_kl``, k3 of the
        policy before the update from the one after, never negative; ``clipfrac_low`` and ``clipfrac_high``, tokens
        whose ratio was clipped where that decided; ``kl_ref``, the KL to the reference, if it is in the loss;
        ``ratio_max``.

    Source: Schulman et al. 2017, equation 7; dual clip (``delta``): Ye et al. 2020, equation 5; TRL's
    ``GRPOTrainer._compute_loss`` and ``RLOOTrainer._compute_loss``. ``tests/rl/test_policy_loss.py``.
    """
    # Masked before exp: an overflow in padding would reach gradients as 0 * inf.
    log_ratio = torch.where(mask, logps - old_logps, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, lengths = log_ratio.exp(), mask.sum(dim=1, keepdim=True).clamp(min=1)
    sampled = old_logps if engine_logps is None else engine_logps
    weights = compute_importance_weights(old_logps, sampled, mask, objective)
    used = ratio
    if objective.importance_sampling_level != "token":
        # Tokens are clamped one by one, so their sum can still overflow exp. Of each answer, (B, 1).
        total, is_mean = log_ratio.sum(dim=1, keepdim=True), objective.importance_sampling_level == "sequence"
        used = (total / lengths if is_mean else total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    losses, is_clipped = _compute_surrogate(logps, used, log_ratio, advantages, mask, objective, weights)
    if (threshold := objective.off_policy_mask_threshold) is not None:
        # Nats a token, (B, 1): by how much less likely the whole answer is now.
        drift = torch.where(mask, sampled - logps.detach(), 0.0).sum(dim=1, keepdim=True) / lengths
        losses = losses * ((advantages >= 0) | (drift <= threshold))
    # VESPO has the engine's weights inside its own weight.
    if objective.loss_type != "vespo":
        losses = losses * weights
    if objective.beta:
        assert ref_logps is not None, "a KL penalty needs a reference"
        gap = torch.where(mask, ref_logps - logps, 0.0)
        # k3, exp(gap) - gap - 1; expm1 keeps the digits of a small gap.
        ref_kl = torch.expm1(gap) - gap
        if objective.use_bias_correction_kl:
            ref_kl = ref_kl * used
        losses = losses + objective.beta * ref_kl
    losses = torch.where(mask, losses, 0.0)
    if objective.loss_type in ("grpo", "sapo"):
        # Mean over the tokens of an answer, (B, T) / (B, 1); the normaliser is the number of answers.
        losses = losses / lengths
    is_clipped, seen = is_clipped & mask, ratio.detach()
    terms = {
        "approx_kl": (seen - 1 - log_ratio.detach()).sum(),
        "clipfrac_low": (is_clipped & (used.detach() < 1)).sum(),
        "clipfrac_high": (is_clipped & (used.detach() > 1)).sum(),
        RATIO_MAX: 1 + (seen - 1).abs().max(),
    }
    if objective.beta:
        terms["kl_ref"] = torch.where(mask, ref_kl, 0.0).detach().sum()
    return losses.sum() / normaliser, terms


def _compute_surrogate(
    logps: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: PolicyObjective,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Loss of each token, broadcastable to ``(B, T)``, and a mask of the clipped ones.

    Source: ``cispo``: MiniMax 2025, "MiniMax-M1"; ``sapo``: Gao et al. 2025, "Soft Adaptive Policy Optimization";
    ``vespo``: TRL's ``get_gamma_weights``.
    """
    if objective.loss_type == "cispo":
        capped = ratio.clamp(max=objective.highest).detach()
        return -capped * advantages * logps, (ratio > objective.highest) & (advantages > 0)
    if objective.loss_type == "sapo":
        positive = advantages > 0
        temperatures = torch.where(positive, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
        soft = torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures
        return -soft * advantages, torch.zeros_like(positive)
    if objective.loss_type == "vespo":
        weight = _compute_vespo_weight(log_ratio.detach(), advantages, mask, objective, weights)
        return -weight * advantages * logps, torch.zeros_like(mask)
    # Both are losses: the larger one is the pessimistic bound, whatever the sign of the advantage.
    free = -advantages * (ratio if objective.delta is None else ratio.clamp(max=objective.delta))
    clipped = -advantages * ratio.clamp(1 - objective.epsilon, 1 + objective.highest)
    return torch.maximum(free, clipped), clipped > free


def _compute_vespo_weight(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, objective: PolicyObjective, weights: Tensor
) -> Tensor:
    """``exp(lambda (1 - w)) w^k`` of the ratio ``w`` of each whole answer, engine weights included; ``(B, 1)``."""
    # log 0 of padding and of masked tokens is -inf; clamped as in TRL.
    by_token = log_ratio + weights.log().clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    # The log-ratio of the policy to the engine, of the whole answer, (B, 1).
    log_w = torch.where(mask, by_token, 0.0).sum(dim=1, keepdim=True).clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    good = advantages >= 0
    power = torch.where(good, objective.vespo_k_pos, objective.vespo_k_neg)
    decay = torch.where(good, objective.vespo_lambda_pos, objective.vespo_lambda_neg).clamp(min=1e-4)
    return (decay + power * log_w - decay * log_w.exp()).exp()


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float | None, num_tokens: int
) -> tuple[Tensor, Terms]:
    """``0.5 max((V - R)^2, (V_clipped - R)^2)``, averaged over the tokens of an optimizer step.

    Args:
        values: Of the critic, differentiable, ``(B, T)``.
        old_values: Of the critic before the updates.
        returns: ``(B, T)``.
        mask: As everywhere.
        cliprange: How far from ``old_values`` the clipped value may be; ``None`` clips nothing.
        num_tokens: Tokens of the whole optimizer step, over all its parts and processes.

    Returns:
        The loss, a differentiable scalar; and ``clipfrac``, tokens whose clipped value decided.

    Source: OpenAI baselines' PPO2, as kept by Huang et al. 2024; ``tests/rl/test_policy_loss.py``.
    """
    clipped_values = values
    if cliprange is not None:
        # Inside the clip range the value itself, bit-identical.
        clipped_values = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    losses = torch.where(mask, 0.5 * torch.maximum(free, clipped), 0.0)
    return losses.sum() / num_tokens, {"clipfrac": ((clipped > free) & mask).sum()}

"""Clipped policy and value losses as pure tensor functions, right-padded answers.

Everywhere ``B`` answers have up to ``T`` tokens; ``mask`` is ``bool (B, T)``, True where a token of an answer stands.
What stands where it is False never counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_IMPORTANCE_WEIGHT: Final = 2.0
"""Cap of the factor by which the trained model finds a token likelier than the engine that sampled it."""
MAX_LOG_RATIO: Final = 20.0
"""Largest log-ratio that is exponentiated: beyond it only the clip decides, and ``exp`` would overflow."""
MIN_VESPO_LOG_RATIO: Final = -18.420680743952367
"""Smallest log-ratio of an answer in VESPO, the logarithm of 1e-8."""


def compute_importance_weights(logps: Tensor, engine_logps: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """How much likelier the trained model finds each token than the engine that sampled it; ``(B, T)``, no gradient.

    Cut off at ``cap``, 0 outside the answers. Multiplies the policy loss.

    Source: truncated importance sampling, Yao et al. 2025; verl's ``rollout_is`` by token.
    """
    weights = torch.exp((logps - engine_logps).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=cap)
    return torch.where(mask, weights, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy's objective; names, values and defaults are those of TRL's ``GRPOConfig``.

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

    @property
    def highest(self) -> float:
        """How far above 1 the ratio counts."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def compute_normaliser(loss_type: str, *, num_answers: float, num_tokens: float, max_length: int) -> float:
    """What the sum of an optimizer step's losses is divided by, over all its micro-batches and processes.

    Args:
        loss_type: As in ``PolicyObjective``.
        num_answers: Of the step.
        num_tokens: Tokens of the step's answers; for ``dapo``, ``cispo`` and ``vespo`` the mean of the steps of a
            generation, as in TRL.
        max_length: Longest answer that the run allows.
    """
    if loss_type == "dr_grpo":
        return num_answers * max_length
    return max(num_answers if loss_type in ("grpo", "sapo", "luspo") else num_tokens, 1.0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What a minibatch, or a part of it, adds to the policy's objective and its figures.

    Attributes:
        loss: Differentiable scalar: the sum over the part divided by the normaliser of the whole step.
        num_low: Tokens whose ratio was clipped from below, where that decided; scalar.
        num_high: From above.
        kl_sum: Sum over tokens of k3 of the policy before the update from the one after; never negative.
        ref_kl_sum: Sum over tokens of the KL to the reference that is in the loss; 0 without one.
        max_ratio_shift: Largest ``|ratio - 1|`` of a token.
    """

    loss: Tensor
    num_low: Tensor
    num_high: Tensor
    kl_sum: Tensor
    ref_kl_sum: Tensor
    max_ratio_shift: Tensor


def compute_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: PolicyObjective,
    *,
    normaliser: float,
    weights: Tensor | None = None,
    engine_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> PolicyLoss:
    """The policy's loss, PPO's among them: ``max(-A r, -A clip(r, 1 - c, 1 + c))`` over the tokens of a step.

    Args:
        logps: Of the policy, differentiable, ``(B, T)``.
        old_logps: Of the policy that answered.
        advantages: ``(B, T)``, or ``(B, 1)`` of whole answers.
        mask: As everywhere.
        objective: Which loss.
        normaliser: From ``compute_normaliser``, for the whole optimizer step.
        weights: Factor of each token's surrogate, ``(B, T)``: from ``compute_importance_weights``; 0 where a token
            teaches nothing but counts.
        engine_logps: Of the engine that sampled, for ``off_policy_mask_threshold``; ``None``: ``old_logps``.
        ref_logps: Of the reference; needed where ``beta`` is not 0.

    Source: Schulman et al. 2017, equation 7; dual clip (``delta``): Ye et al. 2020, equation 5; TRL's
    ``GRPOTrainer._compute_loss`` and ``RLOOTrainer._compute_loss``. ``tests/rl/test_policy_loss.py``.
    """
    log_ratio = torch.where(mask, logps - old_logps, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, lengths = log_ratio.exp(), mask.sum(dim=1, keepdim=True).clamp(min=1)
    used = _raise_to_level(ratio, log_ratio, lengths, objective.importance_sampling_level)
    losses, is_clipped = _compute_surrogate(logps, used, log_ratio, advantages, mask, objective, weights)
    if (threshold := objective.off_policy_mask_threshold) is not None:
        sampled = old_logps if engine_logps is None else engine_logps
        drift = torch.where(mask, sampled - logps.detach(), 0.0).sum(dim=1, keepdim=True) / lengths
        losses = losses * ((advantages >= 0) | (drift <= threshold))
    if weights is not None and objective.loss_type != "vespo":
        losses = losses * weights
    ref_kl = torch.zeros_like(ratio)
    if objective.beta:
        assert ref_logps is not None, "a KL penalty needs a reference"
        gap = torch.where(mask, ref_logps - logps, 0.0)
        ref_kl = torch.expm1(gap) - gap
        if objective.use_bias_correction_kl:
            ref_kl = ref_kl * used
        losses = losses + objective.beta * ref_kl
    losses = torch.where(mask, losses, 0.0)
    if objective.loss_type in ("grpo", "sapo"):
        losses = losses / lengths
    is_clipped, seen = is_clipped & mask, ratio.detach()
    return PolicyLoss(
        loss=losses.sum() / normaliser,
        num_low=(is_clipped & (used.detach() < 1)).sum(),
        num_high=(is_clipped & (used.detach() > 1)).sum(),
        kl_sum=(seen - 1 - log_ratio.detach()).sum(),
        ref_kl_sum=torch.where(mask, ref_kl, 0.0).detach().sum(),
        max_ratio_shift=(seen - 1).abs().max(),
    )


def _raise_to_level(ratio: Tensor, log_ratio: Tensor, lengths: Tensor, level: str) -> Tensor:
    """The ratio that is clipped: ``(B, T)`` of tokens, or ``(B, 1)`` of whole answers."""
    if level == "token":
        return ratio
    total = log_ratio.sum(dim=1, keepdim=True)
    return (total / lengths if level == "sequence" else total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def _compute_surrogate(
    logps: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: PolicyObjective,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss of each token, broadcastable to ``(B, T)``, and where a clip decided it.

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
    free = -advantages * (ratio if objective.delta is None else ratio.clamp(max=objective.delta))
    clipped = -advantages * ratio.clamp(1 - objective.epsilon, 1 + objective.highest)
    return torch.maximum(free, clipped), clipped > free


def _compute_vespo_weight(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, objective: PolicyObjective, weights: Tensor | None
) -> Tensor:
    """``exp(lambda (1 - w)) w^k`` of the ratio ``w`` of each whole answer, engine weights included; ``(B, 1)``."""
    total = log_ratio.sum(dim=1, keepdim=True)
    if weights is not None:
        by_token = weights.log().clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
        total = total + torch.where(mask, by_token, 0.0).sum(dim=1, keepdim=True)
    log_w = total.clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    good = advantages >= 0
    power = torch.where(good, objective.vespo_k_pos, objective.vespo_k_neg)
    decay = torch.where(good, objective.vespo_lambda_pos, objective.vespo_lambda_neg).clamp(min=1e-4)
    return (decay + power * log_w - decay * log_w.exp()).exp()


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """What a minibatch, or a part of it, adds to the critic's objective and its figures.

    Attributes:
        loss: As ``PolicyLoss.loss``.
        num_clipped: Tokens whose clipped value decided; scalar.
    """

    loss: Tensor
    num_clipped: Tensor


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float | None, num_tokens: int
) -> ValueLoss:
    """``0.5 max((V - R)^2, (V_clipped - R)^2)``, a mean over the tokens of an optimizer step.

    Args:
        values: Of the critic, differentiable, ``(B, T)``.
        old_values: Of the critic before the updates.
        returns: ``(B, T)``.
        mask: As everywhere.
        cliprange: How far from ``old_values`` the clipped value may be; ``None`` clips nothing.
        num_tokens: Tokens of the whole optimizer step, over all its parts and processes.

    Source: OpenAI baselines' PPO2, as kept by Huang et al. 2024; ``tests/rl/test_policy_loss.py``.
    """
    clipped_values = values
    if cliprange is not None:
        # Inside the range the value itself, to the last digit.
        clipped_values = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    losses = torch.where(mask, 0.5 * torch.maximum(free, clipped), 0.0)
    return ValueLoss(loss=losses.sum() / num_tokens, num_clipped=((clipped > free) & mask).sum())

"""PPO as pure tensor functions: rewards, advantages, returns, clipped losses; right-padded answers.

Everywhere ``B`` answers have up to ``T`` tokens; ``mask`` is ``bool (B, T)``, True where a token of an answer stands.
What stands where it is False never counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes_lib.config.schema import PPOConfig
from recipes_lib.rl.rollout import Rollout

MAX_IMPORTANCE_WEIGHT = 2.0
"""Cap of the factor by which the trained model finds a token likelier than the engine that sampled it."""
MAX_LOG_RATIO = 20.0
"""Largest log-ratio that is exponentiated: beyond it only the clip decides, and ``exp`` would overflow."""


def estimate_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """``log p - log q`` of each sampled token, in nats: the estimator k1 of ``KL(p || q)``, which may be negative.

    The only one that may stand in a reward: the gradient of its expectation is that of KL, while k3's is off by ``q -
    p`` and k2's has no such relation.

    Source: Schulman 2020, "Approximating KL divergence"; gradients in ``tests/rl/test_ppo_math.py``.
    """
    return logps - ref_logps


def penalise_missing_end(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Scores ``(B,)`` less ``penalty`` where an answer ran into the limit; ``finished`` is ``bool (B,)``."""
    return scores - penalty * (~finished).to(scores.dtype)


def compute_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token, ``(B, T)``: ``-kl_coef * kl``, and the score besides at an answer's last token.

    Their sum over an answer is its score less ``kl_coef`` times its KL.

    Args:
        scores: One for each answer, ``(B,)``.
        kl: In nats a token, ``(B, T)``.
        mask: Every answer has a token.
        kl_coef: KL coefficient: reward subtracted for each nat of KL.

    Source: Ziegler et al. 2019, section 2.2. The score stands at the end-of-text token itself, as in OpenRLHF; TRL
    and the summarisation paper put it one position later, which costs a factor ``lam``.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    last = mask.long().sum(dim=1, keepdim=True) - 1
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def compute_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both ``(B, T)`` and 0 outside the answers.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; after the last token both are 0.
    Tokens outside an answer, also between its tokens, are passed over: neither do they contribute nor do they cut off
    what comes after.

    Args:
        rewards: ``(B, T)``.
        values: Of the state before each token, ``(B, T)``.
        mask: As everywhere.
        gamma: Discount of a later token.
        lam: 1 trusts rewards alone, 0 the critic.

    Source: Schulman et al. 2016, equation 16; ``tests/rl/test_ppo_math.py``.
    """
    advantages = torch.zeros_like(rewards)
    carried, next_values = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        deltas = rewards[:, t] + gamma * next_values - values[:, t]
        is_token = mask[:, t]
        carried = torch.where(is_token, deltas + gamma * lam * carried, carried)
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = torch.where(is_token, carried, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Values ``(B, T)`` with mean 0 and variance 1 over all answers' tokens, 0 elsewhere.

    A single token, or tokens all alike, become 0, or keep their mean.

    Args:
        values: Of a whole rollout, over all processes.
        mask: As everywhere.
        shift_mean: False keeps the mean as it was, as rewards need it.

    Source: Huang et al. 2024, detail 18: biased variance, epsilon ``1e-8``.
    """
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    variance = torch.where(mask, (values - mean) ** 2, 0.0).sum() / count
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def compute_importance_weights(logps: Tensor, engine_logps: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """How much likelier the trained model finds each token than the engine that sampled it; ``(B, T)``, no gradient.

    Cut off at ``cap``, 0 outside the answers. Multiplies the policy loss.

    Source: truncated importance sampling, Yao et al. 2025; verl's ``rollout_is`` by token.
    """
    weights = torch.exp((logps - engine_logps).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=cap)
    return torch.where(mask, weights, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What a minibatch, or a part of it, adds to the policy's objective and its figures.

    Attributes:
        loss: Differentiable scalar: the sum over the part's tokens divided by the number of the whole step's.
        num_low: Tokens whose ratio was clipped from below, where that decided; scalar.
        num_high: From above.
        kl_sum: Sum over tokens of k3 of the policy before the update from the one after; never negative.
        max_ratio_shift: Largest ``|ratio - 1|``.
    """

    loss: Tensor
    num_low: Tensor
    num_high: Tensor
    kl_sum: Tensor
    max_ratio_shift: Tensor


def compute_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    num_tokens: int,
    weights: Tensor | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate ``max(-A r, -A clip(r, 1 - c, 1 + c))``, a mean over the tokens of an optimizer step.

    Args:
        logps: Of the policy, differentiable, ``(B, T)``.
        old_logps: Of the policy that answered.
        advantages: ``(B, T)``.
        mask: As everywhere.
        cliprange: ``c``.
        num_tokens: Tokens of the whole optimizer step, over all its parts and processes.
        weights: From ``compute_importance_weights``.
        dual_clip: Bound on the loss of a token with a negative advantage, in units of ``-A``; above 1.

    Source: Schulman et al. 2017, equation 7; dual clip: Ye et al. 2020, equation 5. ``tests/rl/test_ppo_math.py``.
    """
    log_ratio = torch.where(mask, logps - old_logps, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    losses = torch.maximum(free, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    if weights is not None:
        losses = losses * weights
    is_clipped, seen = (clipped > free) & mask, ratio.detach()
    return PolicyLoss(
        loss=torch.where(mask, losses, 0.0).sum() / num_tokens,
        num_low=(is_clipped & (seen < 1)).sum(),
        num_high=(is_clipped & (seen > 1)).sum(),
        kl_sum=(seen - 1 - log_ratio.detach()).sum(),
        max_ratio_shift=(seen - 1).abs().max(),
    )


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

    Source: OpenAI baselines' PPO2, as kept by Huang et al. 2024; ``tests/rl/test_ppo_math.py``.
    """
    clipped_values = values
    if cliprange is not None:
        # Inside the range the value itself, to the last digit.
        clipped_values = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    losses = torch.where(mask, 0.5 * torch.maximum(free, clipped), 0.0)
    return ValueLoss(loss=losses.sum() / num_tokens, num_clipped=((clipped > free) & mask).sum())


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the variance of returns that the critic explains: 1 is all, 0 what a constant would, below 0 worse."""
    kept_values, kept_returns = values[mask], returns[mask]
    variance = kept_returns.var(unbiased=False)
    if variance == 0:
        return 0.0
    return float(1 - (kept_returns - kept_values).var(unbiased=False) / variance)


class KLController:
    """The KL coefficient: fixed, or adapted so that the KL of an answer comes to a target.

    Attributes:
        kl_coef: The current coefficient.
    """

    def __init__(self, kl_coef: float, *, target_per_sequence: float | None, horizon: float) -> None:
        """Begin at ``kl_coef``.

        Args:
            kl_coef: The initial coefficient.
            target_per_sequence: KL of a whole answer, in nats, that is aimed at; ``None`` keeps the coefficient.
            horizon: Answers over which the coefficient follows.
        """
        self.kl_coef = kl_coef
        self._target = target_per_sequence
        self._horizon = horizon

    def update(self, kl_per_sequence: float, num_answers: int) -> None:
        """Raise or lower the coefficient after ``num_answers`` answers with this mean KL, in nats an answer.

        Source: Ziegler et al. 2019, section 2.2: the relative error is cut off at 0.2.
        """
        if self._target is not None:
            error = min(max(kl_per_sequence / self._target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * num_answers / self._horizon


@dataclass(frozen=True, slots=True)
class Targets:
    """What an iteration learns from.

    Attributes:
        advantages: Whitened, ``(B, T)``; 0 where nothing is learnt.
        returns: What the critic should have said, ``(B, T)``; as ``advantages``.
        scores: What each answer is worth less the penalty, ``(B,)``; NaN of an answer that is not scored.
        total: Sum of each answer's rewards, ``(B,)``; of an answer that is not scored, what it costs alone.
    """

    advantages: Tensor
    returns: Tensor
    scores: Tensor
    total: Tensor


def compute_targets(rollout: Rollout, config: PPOConfig, penalty: float, kl_coef: float) -> Targets:
    """Work out advantages and returns of all answers of an iteration.

    Args:
        rollout: All answers, of all processes.
        config: Discounts, and whether rewards are whitened.
        penalty: Taken off the score of an answer that ran into the limit.
        kl_coef: KL coefficient: reward subtracted for each nat of KL.
    """
    learnt = rollout.loss_mask
    scores = penalise_missing_end(rollout.scores, rollout.finished, penalty)
    rewards = compute_rewards(scores, estimate_kl(rollout.logps, rollout.ref_logps), rollout.mask, kl_coef)
    total = rewards.sum(dim=1)
    if config.whiten_rewards:
        rewards = whiten(rewards, learnt, shift_mean=False)
    advantages, returns = compute_advantages(rewards, rollout.values, learnt, gamma=config.gamma, lam=config.lam)
    return Targets(whiten(advantages, learnt), returns, torch.where(rollout.scored, scores, torch.nan), total)

"""Advantages and returns of sampled answers as pure tensor functions: GAE, leave-one-out, group mean.

Shapes: ``B`` answers of up to ``T`` tokens. ``mask`` is ``bool (B, T)``, True at answer tokens; values at other
positions are ignored.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recipes_lib.config.schema import PPOConfig

ROUNDING: Final = 8 * torch.finfo(torch.float32).eps
"""Relative tolerance for equal rewards: scores of a reward model depend on the batch shape, by rounding."""
GROUP_EPSILON: Final = 1e-4
"""Added to the standard deviation of rewards before division, as in TRL."""


def estimate_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the k1 estimator of ``KL(p || q)`` for each sampled token, ``log p - log q`` in nats; may be negative.

    Only k1 is valid inside a reward: the gradient of its expectation is that of the KL divergence, while k3's has a
    bias of ``q - p`` and k2's is unrelated.

    Source: Schulman 2020, "Approximating KL divergence"; gradients in ``tests/rl/test_advantages.py``.
    """
    return logps - ref_logps


def penalise_missing_end(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Subtract ``penalty`` from the scores, ``(B,)``, of truncated answers: ``finished``, ``bool (B,)``, is False."""
    return scores - penalty * (~finished).to(scores.dtype)


def compute_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return the reward of each token, ``(B, T)``: ``-kl_coef * kl``, plus the score at the last token of the answer.

    The sum over an answer is its score minus ``kl_coef`` times its KL divergence.

    Args:
        scores: Score of each answer, ``(B,)``.
        kl: KL estimate of each token in nats, ``(B, T)``.
        mask: True at answer tokens, ``bool (B, T)``; at least one in each row.
        kl_coef: KL coefficient: reward subtracted for each nat of KL divergence.

    Source: Ziegler et al. 2019, section 2.2. The score is at the end-of-text token itself, as in OpenRLHF; TRL and the
    summarisation paper put it one position later, which costs a factor ``lam``.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    # Index of the last token, (B, 1): answers are padded on the right.
    last = mask.long().sum(dim=1, keepdim=True) - 1
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def compute_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates and returns, both ``(B, T)`` and 0 outside the mask.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; after the last token both are 0.
    Tokens outside the mask, also inside an answer, contribute nothing and do not interrupt the recursion.

    Args:
        rewards: Reward of each token, ``(B, T)``.
        values: Critic's value of the state before each token, ``(B, T)``.
        mask: True at answer tokens, ``bool (B, T)``.
        gamma: Discount factor per token.
        lam: Trace decay: 1 is the Monte Carlo return minus the value, 0 the one-step TD error.

    Source: Schulman et al. 2016, equation 16; ``tests/rl/test_advantages.py``.
    """
    advantages = torch.zeros_like(rewards)
    carried, next_values = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    # Backwards in time, all answers at once; tokens outside the mask keep both carried values, each (B,).
    for t in reversed(range(rewards.shape[1])):
        deltas = rewards[:, t] + gamma * next_values - values[:, t]
        is_token = mask[:, t]
        carried = torch.where(is_token, deltas + gamma * lam * carried, carried)
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = torch.where(is_token, carried, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Normalise values ``(B, T)`` to mean 0 and variance 1 over all tokens of the mask; 0 elsewhere.

    A single token, or equal values, give 0, or their mean if ``shift_mean`` is False.

    Args:
        values: Values of the whole rollout, over all processes, ``(B, T)``.
        mask: True at answer tokens, ``bool (B, T)``.
        shift_mean: Whether to subtract the mean; False for rewards, whose mean is part of the objective.

    Source: Huang et al. 2024, detail 18: biased variance, epsilon ``1e-8``.
    """
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    # Two passes: mean of squares minus squared mean would cancel in float32.
    variance = torch.where(mask, (values - mean) ** 2, 0.0).sum() / count
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def compute_group_advantages(rewards: Tensor, group: int, *, scale: str) -> Tensor:
    """Return GRPO's advantages, ``(B,)``: reward minus the group mean, optionally divided by a standard deviation.

    Args:
        rewards: Reward of each answer, ``(B,)``, answers to one prompt adjacent; NaN without a score: the answer is
            excluded from its group's mean, and its advantage is 0.
        group: Answers per prompt.
        scale: Divisor: standard deviation of the ``group`` or of the whole ``batch``, or ``none``.

    Source: Shao et al. 2024, section 4.1.2; ``none``: Liu et al. 2025, "Understanding R1-Zero-Like Training". TRL's
    ``GRPOTrainer`` in ``tests/rl/test_advantages.py``.
    """
    grouped = rewards.view(-1, group)
    advantages = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale != "none":
        advantages = advantages / (_compute_deviation(grouped if scale == "group" else rewards[None]) + GROUP_EPSILON)
    # NaN: answers without a score, and a group with a single scored one, whose deviation is 0 / 0.
    return advantages.flatten().nan_to_num(nan=0.0)


def find_flat_groups(rewards: Tensor) -> Tensor:
    """Return whether the rewards of each group are equal up to rounding, ``bool (groups,)``: no gradient follows.

    Args:
        rewards: Rewards, ``(groups, answers)``; NaN for answers without a score, which are ignored.
    """
    # torch has no nanmin: NaN becomes inf for the minimum, and -inf for the maximum.
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    # Without any score the difference is -inf, and so the group counts as flat.
    return ~(highest - lowest > ROUNDING * torch.maximum(lowest.abs(), highest.abs()))


def compute_leave_one_out_advantages(rewards: Tensor, group: int, *, normalize: bool = False) -> Tensor:
    """Return RLOO's advantages, ``(B,)``: reward minus the mean of the other answers to the same prompt.

    Args:
        rewards: As for ``compute_group_advantages``, minus ``beta`` times the KL divergence of the whole answer. The
            only scored answer of a group has the advantage 0.
        group: Answers per prompt.
        normalize: Whether to normalise the advantages of all answers to mean 0 and standard deviation 1.

    Source: Ahmadian et al. 2024, equation 8; TRL's ``RLOOTrainer`` in ``tests/rl/test_advantages.py``.
    """
    grouped = rewards.view(-1, group)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    # (groups, group) -> (B,). Without other scored answers this is 0 / 0: NaN, set to 0 at the end.
    advantages = rewards - ((grouped.nansum(dim=1, keepdim=True) - grouped) / others).flatten()
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (_compute_deviation(advantages[None])[0] + GROUP_EPSILON)
    return advantages.nan_to_num(nan=0.0)


def _compute_deviation(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each row, NaN excluded, ``(rows, 1)``; torch has no nanstd."""
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    squares = (values - values.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return (squares / (count - 1)).sqrt()


def adapt_kl_coef(kl_coef: float, kl_per_sequence: float, num_answers: int, config: PPOConfig) -> float:
    """Return the KL coefficient of the next iteration; unchanged without ``kl_target_per_sequence``.

    Args:
        kl_coef: KL coefficient of this iteration.
        kl_per_sequence: Mean KL divergence of its answers, in nats per answer.
        num_answers: Number of its answers.
        config: Target KL divergence, and the horizon of the controller in answers.

    Source: Ziegler et al. 2019, section 2.2: a proportional controller; the relative error is clipped to 0.2. More
    answers than the horizon count as the horizon, because five times as many could make the coefficient negative.
    """
    if config.kl_target_per_sequence is None:
        return kl_coef
    error = min(max(kl_per_sequence / config.kl_target_per_sequence - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(num_answers, config.kl_horizon) / config.kl_horizon)

"""Advantages and returns of sampled answers as pure tensor functions: GAE, leave-one-out, group mean.

Tensors have ``B`` answers of up to ``T`` tokens; ``mask`` is ``bool (B, T)``, True at the tokens of an answer. Values
at other positions are ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recipes_lib.config.schema import PPOConfig
from recipes_lib.rl.rollout import Rollout

ROUNDING: Final = 8 * torch.finfo(torch.float32).eps
"""Relative tolerance for equal rewards: scores of a reward model depend on the batch shape, by rounding."""
GROUP_EPSILON: Final = 1e-4
"""Added to the standard deviation of rewards before division, as in TRL."""


def estimate_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """``log p - log q`` of each sampled token, in nats: the k1 estimator of ``KL(p || q)``, which can be negative.

    k1 is the only valid estimator inside a reward: the gradient of its expectation is that of KL, while k3's is wrong
    by ``q - p`` and k2's is unrelated.

    Source: Schulman 2020, "Approximating KL divergence"; gradients in ``tests/rl/test_advantages.py``.
    """
    return logps - ref_logps


def penalise_missing_end(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Subtract ``penalty`` from scores ``(B,)`` of truncated answers; ``finished`` is ``bool (B,)``."""
    return scores - penalty * (~finished).to(scores.dtype)


def compute_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token, ``(B, T)``: ``-kl_coef * kl``, plus the score at the last token of the answer.

    The sum over an answer is its score minus ``kl_coef`` times its KL.

    Args:
        scores: One for each answer, ``(B,)``.
        kl: In nats a token, ``(B, T)``.
        mask: Every answer has a token.
        kl_coef: KL coefficient: reward subtracted for each nat of KL.

    Source: Ziegler et al. 2019, section 2.2. The score stands at the end-of-text token itself, as in OpenRLHF; TRL
    and the summarisation paper put it one position later, which costs a factor ``lam``.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    # Index of the last token, (B, 1): answers are padded on the right.
    last = mask.long().sum(dim=1, keepdim=True) - 1
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def compute_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both ``(B, T)`` and 0 outside the answers.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; after the last token both are 0.
    Masked tokens, also inside an answer, are skipped: they contribute nothing and do not interrupt the recursion.

    Args:
        rewards: ``(B, T)``.
        values: Of the state before each token, ``(B, T)``.
        mask: As everywhere.
        gamma: Discount of a later token.
        lam: 1 trusts rewards alone, 0 the critic.

    Source: Schulman et al. 2016, equation 16; ``tests/rl/test_advantages.py``.
    """
    advantages = torch.zeros_like(rewards)
    carried, next_values = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    # Backwards in time, all answers at once; masked tokens hand both carried values on unchanged.
    for t in reversed(range(rewards.shape[1])):
        deltas = rewards[:, t] + gamma * next_values - values[:, t]
        is_token = mask[:, t]
        carried = torch.where(is_token, deltas + gamma * lam * carried, carried)
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = torch.where(is_token, carried, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Values ``(B, T)`` with mean 0 and variance 1 over all answers' tokens, 0 elsewhere.

    A single token, or equal values, give 0, or their mean if ``shift_mean`` is False.

    Args:
        values: Of a whole rollout, over all processes.
        mask: As everywhere.
        shift_mean: False keeps the mean as it was, as rewards need it.

    Source: Huang et al. 2024, detail 18: biased variance, epsilon ``1e-8``.
    """
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    # Around the mean: mean of squares less squared mean would cancel in float32.
    variance = torch.where(mask, (values - mean) ** 2, 0.0).sum() / count
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def compute_group_advantages(rewards: Tensor, group: int, *, scale: str) -> Tensor:
    """Reward minus the group mean, ``(B,)``, optionally divided by a standard deviation: GRPO's advantage.

    Args:
        rewards: ``(B,)``; answers to one prompt stand together. NaN of an answer that is not scored: it is excluded
            from its group's mean, and its advantage is 0.
        group: Answers to a prompt.
        scale: What the difference is divided by: the standard deviation of the ``group``, of the whole ``batch``, or
            ``none``.

    Source: Shao et al. 2024, section 4.1.2; ``none``: Liu et al. 2025, "Understanding R1-Zero-Like Training". TRL's
    ``GRPOTrainer`` in ``tests/rl/test_advantages.py``.
    """
    grouped = rewards.view(-1, group)
    advantages = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale == "group":
        advantages = advantages / (_compute_deviation(grouped) + GROUP_EPSILON)
    elif scale == "batch":
        advantages = advantages / (_compute_deviation(rewards[None]) + GROUP_EPSILON)
    # NaN: answers that are not scored, and a group with a single scored one, whose deviation is 0 / 0.
    return advantages.flatten().nan_to_num(nan=0.0)


def find_flat_groups(rewards: Tensor) -> Tensor:
    """Whether the rewards of a group are equal up to rounding, ``bool (groups,)``: such a group gives no gradient.

    Args:
        rewards: ``(groups, answers)``; NaN of an answer that is not scored, which tells nothing apart.
    """
    # NaN is neither the lowest nor the highest.
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    # A group without any reward has the difference -inf, and so counts as flat.
    return ~(highest - lowest > ROUNDING * torch.maximum(lowest.abs(), highest.abs()))


def compute_leave_one_out_advantages(rewards: Tensor, group: int, *, normalize: bool = False) -> Tensor:
    """Reward minus the mean of the other answers to the same prompt, ``(B,)``: RLOO's advantage.

    Args:
        rewards: As for ``compute_group_advantages``, ``beta`` times the KL of the whole answer subtracted. An answer
            without scored siblings has the advantage 0.
        group: Answers to a prompt.
        normalize: Bring the advantages of all answers to mean 0 and standard deviation 1.

    Source: Ahmadian et al. 2024, equation 8; TRL's ``RLOOTrainer`` in ``tests/rl/test_advantages.py``.
    """
    grouped = rewards.view(-1, group)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    # (groups, group) to (B,). Without scored siblings this is 0 / 0, which becomes 0 at the end.
    advantages = rewards - ((grouped.nansum(dim=1, keepdim=True) - grouped) / others).flatten()
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (_compute_deviation(advantages[None])[0] + GROUP_EPSILON)
    return advantages.nan_to_num(nan=0.0)


def _compute_deviation(values: Tensor) -> Tensor:
    """Unbiased standard deviation of the values of each row that are not NaN, ``(rows, 1)``."""
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    squares = (values - values.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return (squares / (count - 1)).sqrt()


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Explained variance of returns by the critic: 1 is perfect, 0 equals a constant, negative is worse."""
    kept_values, kept_returns = values[mask], returns[mask]
    variance = kept_returns.var(unbiased=False)
    if variance == 0:
        return 0.0
    return float(1 - (kept_returns - kept_values).var(unbiased=False) / variance)


def adapt_kl_coef(kl_coef: float, kl_per_sequence: float, num_answers: int, config: PPOConfig) -> float:
    """Return the KL coefficient of the next iteration; the same one without ``kl_target_per_sequence``.

    Args:
        kl_coef: The coefficient so far.
        kl_per_sequence: Mean KL of the last answers, in nats per answer.
        num_answers: Number of these answers.
        config: The KL that is aimed at, and the answers over which the coefficient follows.

    Source: Ziegler et al. 2019, section 2.2: the relative error is cut off at 0.2.
    """
    if config.kl_target_per_sequence is None:
        return kl_coef
    error = min(max(kl_per_sequence / config.kl_target_per_sequence - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_answers / config.kl_horizon)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and figures of an iteration.

    Attributes:
        rollout: With advantages, and returns where there is a critic.
        rewards: What the guard of rewards judges, ``(groups, answers)``; NaN of answers that are not scored.
        total: Sum of each answer's rewards, ``(B,)``; in PPO, of an answer that is not scored, what it costs alone.
    """

    rollout: Rollout
    rewards: Tensor
    total: Tensor


def compute_targets(rollout: Rollout, config: PPOConfig, penalty: float, kl_coef: float) -> Estimate:
    """Compute whitened advantages, and returns, of all answers of an iteration; both 0 where nothing is learnt.

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
    learning = dataclasses.replace(rollout, advantages=whiten(advantages, learnt), returns=returns)
    # One group of all answers: the critic replaces the other answers to a prompt as the baseline.
    return Estimate(learning, torch.where(rollout.scored, scores, torch.nan)[None], total)

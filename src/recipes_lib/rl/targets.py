"""What the answers of an iteration teach: advantages for the policy, returns for the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes_lib.config.schema import PPOConfig
from recipes_lib.rl.ppo_math import compute_advantages, compute_rewards, estimate_kl, penalise_missing_end, whiten
from recipes_lib.rl.rollout import Rollout


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
        kl_coef: Price of a nat of KL.
    """
    learnt = rollout.loss_mask
    scores = penalise_missing_end(rollout.scores, rollout.finished, penalty)
    rewards = compute_rewards(scores, estimate_kl(rollout.logps, rollout.ref_logps), rollout.mask, kl_coef)
    total = rewards.sum(dim=1)
    if config.whiten_rewards:
        rewards = whiten(rewards, learnt, shift_mean=False)
    advantages, returns = compute_advantages(rewards, rollout.values, learnt, gamma=config.gamma, lam=config.lam)
    return Targets(whiten(advantages, learnt), returns, torch.where(rollout.scored, scores, torch.nan), total)

"""Schedule, advantages and objective of PPO, RLOO and GRPO."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes_lib.config.schema import PPOConfig, RecipeConfig
from recipes_lib.rl.monitor import Figures, average_steps, describe_values
from recipes_lib.rl.objectives import (
    PolicyObjective,
    compute_advantages,
    compute_group_advantages,
    compute_leave_one_out_advantages,
    compute_rewards,
    estimate_kl,
    find_flat_groups,
    penalise_missing_end,
    whiten,
)
from recipes_lib.rl.rollout import Rollout
from recipes_lib.rl.rollout_schedule import compute_group_schedule, compute_schedule


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and rewards of an iteration.

    Attributes:
        rollout: The rollout with advantages, and with returns if there is a critic.
        rewards: Rewards that ``RewardGuard`` checks, ``(groups, answers)``; NaN for answers without a score, and in
            groups without an answer in the loss.
        total: Sum of each answer's rewards, penalties subtracted, ``(B,)``; without a score, NaN, or in PPO the
            penalties alone.
    """

    rollout: Rollout
    rewards: Tensor
    total: Tensor


def compute_targets(rollout: Rollout, config: PPOConfig, penalty: float, kl_coef: float) -> Estimate:
    """Compute whitened advantages, and returns, of all answers of an iteration; both 0 outside the loss mask.

    Args:
        rollout: Answers of all processes.
        config: Discount factors, and whether rewards are whitened.
        penalty: Score subtracted from answers that reach the length limit.
        kl_coef: KL coefficient: reward subtracted for each nat of KL divergence from the reference.
    """
    mask = rollout.loss_mask
    scores = penalise_missing_end(rollout.scores, rollout.finished, penalty)
    rewards = compute_rewards(scores, estimate_kl(rollout.logps, rollout.ref_logps), rollout.mask, kl_coef)
    total = rewards.sum(dim=1)
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = compute_advantages(rewards, rollout.values, mask, gamma=config.gamma, lam=config.lam)
    learning = dataclasses.replace(rollout, advantages=whiten(advantages, mask), returns=returns)
    # One group of all answers: the critic replaces the other answers to a prompt as the baseline.
    return Estimate(learning, torch.where(rollout.scored, scores, torch.nan)[None], total)


class PPOMethod:
    """Generalised advantage estimation over a critic."""

    def __init__(self, config: RecipeConfig, num_prompts: int, world_size: int) -> None:
        """Read the keys of the configuration.

        Raises:
            ConfigError: As ``compute_schedule``.
        """
        self.schedule = compute_schedule(num_prompts, config, world_size)
        # Mean over the tokens of a step, as in PPO; the other normalisers are those of GRPO's variants.
        self.objective = PolicyObjective("bnpo", epsilon=config.ppo.cliprange, delta=config.ppo.dual_clip)
        self.target_kl = config.ppo.target_kl
        self._config = config

    def estimate(self, rollout: Rollout, kl_coef: float) -> Estimate:
        """Compute the advantages and returns of all answers of an iteration, over all processes."""
        return compute_targets(rollout, self._config.ppo, self._config.rewards.missing_eos_penalty or 0.0, kl_coef)

    def describe(self, estimate: Estimate, policy: Sequence[Figures], critic: Sequence[Figures]) -> Figures:
        """Return the explained variance of the critic and the averages of the updates."""
        return describe_values(estimate.rollout) | average_steps("policy", policy) | average_steps("value", critic)


class GroupMethod:
    """RLOO and GRPO: the baseline is the other answers to the same prompt instead of a critic."""

    target_kl: float | None = None

    def __init__(self, config: RecipeConfig, num_prompts: int, world_size: int) -> None:
        """Read the keys of the configuration.

        Raises:
            ConfigError: As ``compute_group_schedule``.
        """
        self.schedule = compute_group_schedule(num_prompts, config, world_size)
        self._config, self._is_rloo = config, config.recipe == "rloo"
        if self._is_rloo:
            clips = {name: config.read(name) for name in ("epsilon", "epsilon_high")}
            # RLOO's ratio is that of the whole answer, and its loss a mean over answers, as in TRL.
            self.objective = PolicyObjective("grpo", "answer", **clips)
        else:
            names = [field.name for field in dataclasses.fields(PolicyObjective)]
            self.objective = PolicyObjective(**{name: config.read(name) for name in names})

    def estimate(self, rollout: Rollout, kl_coef: float) -> Estimate:
        """Compute the advantage of each answer, the same at all of its tokens.

        A truncated answer that ``mask_truncated_completions`` excludes from the loss still counts in its group's mean,
        without its KL divergence, as in TRL.
        """
        read, group = self._config.read, self.schedule.group
        scores = penalise_missing_end(rollout.scores, rollout.finished, self._config.rewards.missing_eos_penalty or 0.0)
        scores = total = torch.where(rollout.scored, scores, torch.nan)
        included = rollout.scored & rollout.finished if read("mask_truncated_completions") else rollout.scored
        estimated = dataclasses.replace(rollout, scored=included)
        if self._is_rloo:
            kl = torch.where(estimated.loss_mask, estimate_kl(rollout.logps, rollout.ref_logps), 0.0)
            total = scores - read("beta") * kl.sum(dim=1)
            advantages = compute_leave_one_out_advantages(total, group, normalize=read("normalize_advantages"))
        else:
            # TRL accepts booleans too: true is "group", false is "none".
            scale = {True: "group", False: "none"}.get(read("scale_rewards"), read("scale_rewards"))
            advantages = compute_group_advantages(scores, group, scale=scale)
        # (B, 1) * (B, T)
        estimated = dataclasses.replace(estimated, advantages=advantages[:, None] * rollout.mask)
        # A group without an answer in the loss has no signal, whatever its rewards.
        rewards = torch.where(included.view(-1, group).any(dim=1, keepdim=True), scores.view(-1, group), torch.nan)
        return Estimate(estimated, rewards, total)

    def describe(self, estimate: Estimate, policy: Sequence[Figures], critic: Sequence[Figures]) -> Figures:
        """Return the metrics of an iteration, those that TRL logs under its names."""
        known = estimate.total[~estimate.total.isnan()]
        steps = average_steps("policy", policy)
        return steps | {
            **({"reward": float(known.mean())} if len(known) else {}),
            **({"reward_std": float(known.std())} if len(known) > 1 else {}),
            "frac_reward_zero_std": float(find_flat_groups(estimate.rewards).float().mean()),
            "clip_ratio/low_mean": steps.get("policy/clipfrac_low", 0.0),
            "clip_ratio/high_mean": steps.get("policy/clipfrac_high", 0.0),
            "clip_ratio/region_mean": steps.get("policy/clipfrac", 0.0),
            **({"entropy": steps["policy/entropy"]} if "policy/entropy" in steps else {}),
            **({"kl": steps["policy/kl_ref"]} if "policy/kl_ref" in steps else {}),
        }


Method = PPOMethod | GroupMethod
"""Attributes of both: ``schedule`` of the run; ``objective`` of the policy; ``target_kl``, the KL divergence in nats a
token at which the updates of an iteration end."""

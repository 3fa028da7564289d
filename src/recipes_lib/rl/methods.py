"""Schedule, advantages and objective of PPO, RLOO and GRPO."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.rl.advantages import (
    Estimate,
    compute_group_advantages,
    compute_leave_one_out_advantages,
    compute_targets,
    estimate_kl,
    find_flat_groups,
    penalise_missing_end,
)
from recipes_lib.rl.monitor import Figures, average_steps, describe_values
from recipes_lib.rl.policy_loss import PolicyObjective
from recipes_lib.rl.rollout import Rollout
from recipes_lib.rl.rollout_schedule import compute_group_schedule, compute_schedule


class PPOMethod:
    """Generalised advantage estimation over a critic."""

    def __init__(self, config: RecipeConfig, num_prompts: int, world_size: int) -> None:
        """Read the keys of the configuration.

        Raises:
            ConfigError: As ``compute_schedule``.
        """
        self.schedule = compute_schedule(num_prompts, config, world_size)
        self.objective = PolicyObjective("bnpo", epsilon=config.ppo.cliprange, delta=config.ppo.dual_clip)
        self.target_kl = config.ppo.target_kl
        self.num_idle_iterations = config.critic.critic_warmup_iterations
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
    num_idle_iterations = 0

    def __init__(self, config: RecipeConfig, num_prompts: int, world_size: int) -> None:
        """Read the keys of the configuration.

        Raises:
            ConfigError: As ``compute_group_schedule``.
        """
        self.schedule = compute_group_schedule(num_prompts, config, world_size)
        self._config, self._is_rloo = config, config.recipe == "rloo"
        if self._is_rloo:
            clips = {name: config.read(name) for name in ("epsilon", "epsilon_high")}
            self.objective = PolicyObjective("grpo", "answer", **clips)
        else:
            names = [field.name for field in dataclasses.fields(PolicyObjective)]
            self.objective = PolicyObjective(**{name: config.read(name) for name in names})

    def estimate(self, rollout: Rollout, kl_coef: float) -> Estimate:
        """Compute advantages per answer; a truncated answer that is masked from the loss still counts in its group."""
        read, group = self._config.read, self.schedule.group
        penalty = self._config.rewards.missing_eos_penalty or 0.0
        scores = penalise_missing_end(rollout.scores, rollout.finished, penalty)
        scores = torch.where(rollout.scored, scores, torch.nan)
        total = scores
        if self._is_rloo:
            kl = torch.where(rollout.mask, estimate_kl(rollout.logps, rollout.ref_logps), 0.0)
            total = scores - read("beta") * kl.sum(dim=1)
            advantages = compute_leave_one_out_advantages(total, group, normalize=read("normalize_advantages"))
        else:
            # TRL also accepts a boolean scale: true means the group's.
            scale = {True: "group", False: "none"}.get(read("scale_rewards"), read("scale_rewards"))
            advantages = compute_group_advantages(scores, group, scale=scale)
        learnt = dataclasses.replace(rollout, advantages=advantages[:, None] * rollout.mask)
        if read("mask_truncated_completions"):
            learnt = dataclasses.replace(learnt, scored=rollout.scored & rollout.finished)
        return Estimate(learnt, scores.view(-1, group), total)

    def describe(self, estimate: Estimate, policy: Sequence[Figures], critic: Sequence[Figures]) -> Figures:
        """Return metrics under TRL's names."""
        known = estimate.total[~estimate.total.isnan()]
        steps = average_steps("policy", policy)
        low, high = steps.get("policy/clipfrac_low", 0.0), steps.get("policy/clipfrac_high", 0.0)
        return steps | {
            **({"reward": float(known.mean())} if len(known) else {}),
            **({"reward_std": float(known.std())} if len(known) > 1 else {}),
            "frac_reward_zero_std": float(find_flat_groups(estimate.rewards).float().mean()),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            **({"entropy": steps["policy/entropy"]} if "policy/entropy" in steps else {}),
            **({"kl": steps["policy/kl_ref"]} if "policy/kl_ref" in steps else {}),
        }


Method = PPOMethod | GroupMethod
"""Each has the ``schedule`` of the run; the ``objective`` of the policy; ``target_kl``, a token, from the policy that
answered, at which updates end; and ``num_idle_iterations`` before the policy learns."""


def build_method(config: RecipeConfig, num_prompts: int, world_size: int) -> Method:
    """Build the method of a recipe for a number of prompts and of processes.

    Raises:
        ConfigError: As ``PPOMethod`` and ``GroupMethod``.
    """
    return (PPOMethod if config.recipe == "ppo" else GroupMethod)(config, num_prompts, world_size)

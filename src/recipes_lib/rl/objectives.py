"""Advantages, returns, policy and value losses as pure tensor functions of right-padded answers.

Shapes: ``B`` answers of up to ``T`` tokens. ``mask`` is ``bool (B, T)``, True at answer tokens; values at other
positions are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    Source: Schulman 2020, "Approximating KL divergence"; gradients in ``tests/rl/test_objectives.py``.
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

    Source: Schulman et al. 2016, equation 16; ``tests/rl/test_objectives.py``.
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

    Equal rewards (``find_flat_groups``) give 0, not their rounding errors divided by a standard deviation of rounding.

    Source: Shao et al. 2024, section 4.1.2; ``none``: Liu et al. 2025, "Understanding R1-Zero-Like Training". TRL's
    ``GRPOTrainer`` in ``tests/rl/test_objectives.py``.
    """
    grouped = rewards.view(-1, group)
    advantages = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale != "none":
        advantages = advantages / (_compute_deviation(grouped if scale == "group" else rewards[None]) + GROUP_EPSILON)
    advantages = advantages.masked_fill(find_flat_groups(grouped)[:, None], 0.0)
    # NaN: answers without a score.
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

    Source: Ahmadian et al. 2024, equation 8; TRL's ``RLOOTrainer`` in ``tests/rl/test_objectives.py``.
    """
    grouped = rewards.view(-1, group)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    # Without other scored answers this is 0 / 0: NaN, set to 0 at the end.
    advantages = grouped - (grouped.nansum(dim=1, keepdim=True) - grouped) / others
    # As in GRPO; NaN remains, so that the normalisation leaves it out. (groups, group) -> (B,).
    is_rounding = find_flat_groups(grouped)[:, None] & ~advantages.isnan()
    advantages = advantages.masked_fill(is_rounding, 0.0).flatten()
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


MAX_LOG_RATIO: Final = 20.0
"""Bound of exponentiated log-ratios: ``exp`` would overflow, and beyond it the loss is clipped anyway."""
MIN_VESPO_LOG_RATIO: Final = -18.420680743952367
"""Lower bound of an answer's log-ratio in VESPO, ``log(1e-8)``, as in TRL."""


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Options of the policy objective; names, values and defaults are those of ``grpo`` and so of TRL's ``GRPOConfig``.

    Attributes:
        loss_type: ``grpo``, ``dr_grpo``, ``bnpo``, ``dapo``, ``luspo``: the clipped surrogate with different
            normalisers (``compute_normaliser``); ``cispo``, ``sapo``, ``vespo``: other surrogates.
        importance_sampling_level: Probability ratio that is clipped: of a ``token``; of a ``sequence``, the geometric
            mean over its tokens (GSPO); of an ``answer``, the product over its tokens (RLOO).
        epsilon: Lower clip range: ratios below ``1 - epsilon`` are clipped.
        epsilon_high: Upper clip range, ``epsilon`` if ``None``; in ``cispo`` the largest ratio itself.
        delta: Upper bound of the unclipped ratio (dual clip), which bounds the loss at negative advantages; above 1,
            because a clipped ratio of 1 would have no gradient at positive ones. ``None`` disables it.
        beta: Coefficient of the k3 estimate of the KL divergence to the reference, per token, in the loss.
        use_bias_correction_kl: Whether that estimate is multiplied by the ratio.
        off_policy_mask_threshold: Answers with a negative advantage are excluded from the gradient if their mean
            log-probability per token fell by more than this many nats since sampling; ``None`` disables it.
        sapo_temperature_pos: Temperature of the soft clip of ``sapo`` at positive advantages.
        sapo_temperature_neg: Temperature of the soft clip of ``sapo`` at other advantages.
        vespo_k_pos: Exponent of the weight of ``vespo`` at non-negative advantages.
        vespo_lambda_pos: Decay of the weight of ``vespo`` at non-negative advantages.
        vespo_k_neg: Exponent of the weight of ``vespo`` at negative advantages.
        vespo_lambda_neg: Decay of the weight of ``vespo`` at negative advantages.
        vllm_importance_sampling_correction: Whether the surrogate is multiplied by ``compute_importance_weights``, with
            any engine.
        vllm_importance_sampling_mode: Importance weights per ``token`` or per ``sequence``, clamped to the bounds
            (``_truncate``) or set to 0 beyond them (``_mask``).
        vllm_importance_sampling_clip_max: Upper bound of importance weights; ``None`` for no bound.
        vllm_importance_sampling_clip_min: Lower bound of importance weights; ``None`` for no bound.
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
    vllm_importance_sampling_clip_max: float | None = 2.0
    vllm_importance_sampling_clip_min: float | None = None

    @property
    def highest(self) -> float:
        """Upper clip range: ratios above 1 plus this are clipped."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def compute_importance_weights(logps: Tensor, engine_logps: Tensor, mask: Tensor, objective: PolicyObjective) -> Tensor:
    """Return the importance weight of each token, policy over engine probability, ``(B, T)``, without gradient.

    Args:
        logps: Log-probabilities by the policy that sampled, from the training graph, ``(B, T)``.
        engine_logps: Log-probabilities by the engine that sampled, ``(B, T)``.
        mask: True at answer tokens, ``bool (B, T)``; weights are 0 elsewhere.
        objective: Level and bounds of the weights.

    Source: truncated importance sampling, Yao et al. 2025; TRL's ``vllm_importance_sampling_mode``.
    """
    level, _, treatment = objective.vllm_importance_sampling_mode.partition("_")
    # Detached: the weight corrects the sampling distribution, and must not receive gradients.
    log_ratio = torch.where(mask, logps - engine_logps, 0.0).detach()
    if not objective.vllm_importance_sampling_correction:
        log_ratio = torch.zeros_like(log_ratio)
    elif level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    lowest, highest = objective.vllm_importance_sampling_clip_min, objective.vllm_importance_sampling_clip_max
    bounded = ratio.clamp(lowest or 0.0, highest)
    if treatment == "mask":
        # Clamping returns values inside the bounds unchanged, bit by bit.
        bounded = torch.where(bounded == ratio, ratio, 0.0)
    return torch.where(mask, bounded, 0.0)


def compute_normaliser(
    loss_type: str, *, num_answers: int, num_tokens: int, mean_tokens: float, max_length: int
) -> float:
    """Return the divisor of an optimizer step's summed losses, over all its micro-batches and processes.

    Args:
        loss_type: ``PolicyObjective.loss_type``.
        num_answers: Answers of the step.
        num_tokens: Tokens of these answers.
        mean_tokens: Mean tokens per step of the iteration, so that all its steps have one divisor, as in TRL.
        max_length: ``response_length`` of the run.
    """
    if loss_type == "dr_grpo":
        return num_answers * max_length
    if loss_type in ("grpo", "sapo", "luspo"):
        return num_answers
    return max(mean_tokens if loss_type in ("dapo", "cispo", "vespo") else num_tokens, 1.0)


Terms = dict[str, Tensor]
"""Metrics of a micro-batch by name, scalars without gradient: sums over tokens, or maxima."""
RATIO_MAX: Final = "ratio_max"
"""The metric that is a maximum: 1 plus the largest distance of a token's ratio from 1."""


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
    """Return the policy loss; in PPO ``max(-A r, -A clip(r, 1 - c, 1 + c))``, averaged over the tokens of a step.

    Args:
        logps: Log-probabilities by the current policy, differentiable, ``(B, T)`` in nats.
        old_logps: Log-probabilities by the policy that sampled, ``(B, T)``.
        advantages: Advantages of tokens, ``(B, T)``, or of answers, ``(B, 1)``.
        mask: True at tokens that count in the loss, ``bool (B, T)``.
        objective: Options of the loss.
        normaliser: Divisor of the whole optimizer step, from ``compute_normaliser``.
        engine_logps: Log-probabilities by the engine that sampled, ``(B, T)``, for ``compute_importance_weights`` and
            ``off_policy_mask_threshold``; ``None`` stands for ``old_logps``. Tokens of weight 0 contribute no gradient
            but count in the normaliser.
        ref_logps: Log-probabilities by the reference, ``(B, T)``; required unless ``beta`` is 0.

    Returns:
        The sum of the losses divided by the normaliser, a differentiable scalar; and metrics, sums over tokens:
        ``approx_kl``, the k3 estimate of the KL divergence from the policy that sampled, never negative;
        ``clipfrac_low`` and ``clipfrac_high``, the number of tokens at which clipping from below or above is active,
        and ``clipfrac``, their sum;
        ``kl_ref``, the KL divergence to the reference if ``beta`` is not 0; and the maximum ``ratio_max``.

    Source: Schulman et al. 2017, equation 7; dual clip (``delta``): Ye et al. 2020, equation 5; TRL's
    ``GRPOTrainer._compute_loss`` and ``RLOOTrainer._compute_loss``. ``tests/rl/test_objectives.py``.
    """
    # Masked before exp: an overflow at padding would make its gradient 0 * inf = NaN.
    log_ratio = torch.where(mask, logps - old_logps, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, lengths = log_ratio.exp(), mask.sum(dim=1, keepdim=True).clamp(min=1)
    sampled = old_logps if engine_logps is None else engine_logps
    weights = compute_importance_weights(old_logps, sampled, mask, objective)
    used = ratio
    if objective.importance_sampling_level != "token":
        # Of whole answers, (B, 1). Tokens are clamped one by one, so their sum can still overflow exp.
        total, is_mean = log_ratio.sum(dim=1, keepdim=True), objective.importance_sampling_level == "sequence"
        used = (total / lengths if is_mean else total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    is_vespo = objective.loss_type == "vespo"
    factor = _compute_vespo_weight(log_ratio.detach(), advantages, mask, objective, weights) if is_vespo else used
    losses, is_clipped = _compute_surrogate(logps, factor, advantages, objective)
    if (threshold := objective.off_policy_mask_threshold) is not None:
        # Mean decrease of the answer's log-probability since sampling, (B, 1) in nats per token.
        drift = torch.where(mask, sampled - logps.detach(), 0.0).sum(dim=1, keepdim=True) / lengths
        losses = losses * ((advantages >= 0) | (drift <= threshold))
    # VESPO's weight includes the importance weights.
    if not is_vespo:
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
        # (B, T) / (B, 1): means over answers, because their normaliser is the number of answers.
        losses = losses / lengths
    is_clipped, seen = is_clipped & mask, ratio.detach()
    low, high = ((is_clipped & is_beyond).sum() for is_beyond in (used.detach() < 1, used.detach() > 1))
    terms = {
        "approx_kl": (seen - 1 - log_ratio.detach()).sum(),
        "clipfrac_low": low,
        "clipfrac_high": high,
        "clipfrac": low + high,
        RATIO_MAX: 1 + (seen - 1).abs().max(),
    }
    if objective.beta:
        terms["kl_ref"] = torch.where(mask, ref_kl, 0.0).detach().sum()
    return losses.sum() / normaliser, terms


def _compute_surrogate(
    logps: Tensor, ratio: Tensor, advantages: Tensor, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, broadcastable to ``(B, T)``, and a mask of the tokens where clipping is active.

    ``ratio`` is that of tokens or answers, in ``vespo`` the weight of each answer.

    Source: ``cispo``: MiniMax 2025, "MiniMax-M1"; ``sapo``: Gao et al. 2025, "Soft Adaptive Policy Optimization";
    ``vespo``: TRL's ``get_gamma_weights``.
    """
    if objective.loss_type == "cispo":
        # The ratio only weights the gradient of log p, and clipped tokens keep theirs, unlike in PPO.
        capped = ratio.clamp(max=objective.highest).detach()
        return -capped * advantages * logps, (ratio > objective.highest) & (advantages > 0)
    if objective.loss_type == "sapo":
        positive = advantages > 0
        temperatures = torch.where(positive, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
        soft = torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures
        return -soft * advantages, torch.zeros_like(positive)
    if objective.loss_type == "vespo":
        return -ratio * advantages * logps, torch.zeros_like(advantages > 0)
    # The maximum of two losses is PPO's pessimistic bound, for either sign of the advantage.
    free = -advantages * (ratio if objective.delta is None else ratio.clamp(max=objective.delta))
    clipped = -advantages * ratio.clamp(1 - objective.epsilon, 1 + objective.highest)
    return torch.maximum(free, clipped), clipped > free


def _compute_vespo_weight(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, objective: PolicyObjective, weights: Tensor
) -> Tensor:
    """Return ``exp(lambda (1 - w)) w^k`` of each answer's ratio ``w`` of policy to engine, ``(B, 1)``."""
    # The logarithm of weights of 0 is -inf; clamped as in TRL.
    by_token = log_ratio + weights.log().clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    # (B, T) -> (B, 1)
    log_w = torch.where(mask, by_token, 0.0).sum(dim=1, keepdim=True).clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    good = advantages >= 0
    power = torch.where(good, objective.vespo_k_pos, objective.vespo_k_neg)
    decay = torch.where(good, objective.vespo_lambda_pos, objective.vespo_lambda_neg).clamp(min=1e-4)
    return (decay + power * log_w - decay * log_w.exp()).exp()


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float | None, num_tokens: int
) -> tuple[Tensor, Terms]:
    """Return the value loss ``0.5 max((V - R)^2, (V_clipped - R)^2)``, averaged over the tokens of a step.

    Args:
        values: Values by the critic, differentiable, ``(B, T)``.
        old_values: Values by the critic before the updates of this iteration, ``(B, T)``.
        returns: Targets, ``(B, T)``.
        mask: True at tokens that count in the loss, ``bool (B, T)``.
        cliprange: Largest distance of the clipped values from ``old_values``; ``None`` disables clipping.
        num_tokens: Tokens of the whole optimizer step, over all its micro-batches and processes.

    Returns:
        The loss, a differentiable scalar; and ``clipfrac``, the number of tokens at which clipping is active.

    Source: OpenAI baselines' PPO2, as kept by Huang et al. 2024; ``tests/rl/test_objectives.py``.
    """
    clipped_values = values
    if cliprange is not None:
        # Not old + clamp(values - old): inside the range this is the value itself, bit by bit.
        clipped_values = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    losses = torch.where(mask, 0.5 * torch.maximum(free, clipped), 0.0)
    return losses.sum() / num_tokens, {"clipfrac": ((clipped > free) & mask).sum()}

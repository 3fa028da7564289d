"""Metrics of an iteration, checks before its first update, and sample answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes_lib.errors import DivergedError
from recipes_lib.rl.objectives import PolicyObjective, compute_importance_weights, estimate_kl
from recipes_lib.rl.rollout import Rollout
from recipes_lib.training.evaluation.samples import Sample

Figures = dict[str, float]
"""Metrics by name."""

TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Rounding tolerance in nats per token between two passes of one model over the same answers, in other batches; by the
dtype of ``get_rounding_dtype``."""
ROOT_MEAN_SQUARE_TO_MEAN: Final = 4.0
"""Multiple of ``TOLERANCE``, the bound of a mean, that bounds a root mean square, which few tokens dominate. In
bfloat16 it was up to 0.055 nats for random models of 16 layers with logits up to 29: twice the mean."""
_GRAM: Final = 4
_HASH_BASE: Final = 0x5851F42D4C957F2D


def describe_rollout(
    rollout: Rollout, reward_names: Collection[str], total: Tensor, objective: PolicyObjective
) -> Figures:
    """Return statistics of the answers of an iteration, before any update.

    Args:
        rollout: Answers of all processes.
        reward_names: Names of the rewards, in their order.
        total: Sum of each answer's rewards, penalties subtracted, ``(B,)``.
        objective: Policy objective, which determines the importance weights.
    """
    mask, lengths = rollout.mask, rollout.lengths.float()
    kl = torch.where(mask, estimate_kl(rollout.logps, rollout.ref_logps), 0.0)
    weights = compute_importance_weights(rollout.logps, rollout.engine_logps, mask, objective)
    gap = torch.where(mask, rollout.engine_logps - rollout.logps, 0.0)
    num_tokens = rollout.num_tokens
    figures = {
        **average_rewards("objective/score", rollout, reward_names),
        "objective/kl_seq": float(kl.sum(dim=1).mean()),
        "objective/kl_token": float(kl.sum()) / num_tokens,
        "objective/finish_rate": float(rollout.finished.float().mean()),
        "objective/length": float(lengths.mean()),
        "objective/unique_4_grams": measure_unique_grams(rollout),
        "rollout/engine_mismatch_kl": float(gap.sum()) / num_tokens,
        "rollout/is_weight_mean": float(weights.sum()) / num_tokens,
        "rollout/is_weight_max": float(weights.max()),
    }
    if (scored := rollout.scored).any():
        scores = rollout.scores[scored]
        figures |= {
            "objective/score_std": float(scores.std(unbiased=False)),
            "objective/reward_total": float(total[scored].mean()),
            "objective/score_length_correlation": correlate(scores, lengths[scored]),
        }
    return figures


def average_rewards(name: str, rollout: Rollout, reward_names: Collection[str]) -> Figures:
    """Return the mean score as ``name``, and if there are several rewards the mean of each as ``name/<reward>``.

    Means are over the answers that have the reward; a reward that no answer has is omitted.
    """
    scores, means = rollout.scores[rollout.scored], rollout.rewards.nanmean(dim=0).tolist()
    parts = {f"{name}/{reward}": mean for reward, mean in zip(reward_names, means, strict=True) if not math.isnan(mean)}
    return ({name: float(scores.mean())} if len(scores) else {}) | (parts if len(means) > 1 else {})


def describe_values(rollout: Rollout) -> Figures:
    """Return the explained variance of the critic's values in an iteration; empty if no answer is scored."""
    assert rollout.returns is not None
    values, returns = rollout.values[rollout.loss_mask], rollout.returns[rollout.loss_mask]
    if not len(values):
        return {}
    variance, errors = returns.var(unbiased=False), returns - values
    return {
        # 1 is perfect, 0 equals a constant prediction, negative is worse.
        "value/explained_var": float(1 - errors.var(unbiased=False) / variance) if variance else 0.0,
        "value/mean": float(values.mean()),
        "value/return_mean": float(returns.mean()),
    }


def average_steps(prefix: str, steps: Sequence[Figures]) -> Figures:
    """Return the means of metrics over an iteration's steps, and the number of updates; empty without steps."""
    if not steps:
        return {}
    # A step that ``target_kl`` skipped has no gradient norm.
    columns = {name: [step[name] for step in steps if name in step] for name in {**steps[0], **steps[-1]}}
    figures = {name: sum(values) / len(values) for name, values in columns.items()}
    if "ratio_max" in columns:
        figures["ratio_max"] = max(columns["ratio_max"])
    figures |= {"lr": steps[-1]["lr"], "num_updates": float(len(columns.get("grad_norm", [])))}
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def verify_first_minibatch(kl: float, dtype: torch.dtype) -> None:
    """Check by ``approx_kl`` that the policy ratio is 1 before the first update of an iteration.

    Raises:
        DivergedError: The policy's log-probabilities changed since they were computed for the rollout.
    """
    # k3 of a small log-ratio d is d^2 / 2: this is the root mean square of d.
    shift, allowed = (2 * max(kl, 0.0)) ** 0.5, ROOT_MEAN_SQUARE_TO_MEAN * TOLERANCE[dtype]
    cause = "noise of the model in training mode, such as router jitter, or a kernel that rounds differently there"
    remedy = f"perhaps {cause}: try `attn_implementation: eager`, or `bf16: false`"
    _verify_shift(shift, allowed, "of this iteration the log-probabilities of policy and rollout", f": {remedy}")


def verify_first_rollout(rollout: Rollout, dtype: torch.dtype) -> str:
    """Check that policy and reference are equal before the first update, and return a line with the result.

    Raises:
        DivergedError: They differ by more than rounding.
    """
    shift = float((rollout.logps - rollout.ref_logps)[rollout.mask].abs().mean())
    _verify_shift(shift, TOLERANCE[dtype], "policy and reference")
    return f"step 0: policy and reference differ by {shift:.1e} nats per token"


def _verify_shift(shift: float, allowed: float, what: str, remedy: str = "") -> None:
    # A negated comparison, so that NaN fails.
    if not shift <= allowed:
        found = f"{what} differ by {shift:.2g} nats per token; rounding explains {allowed:g}"
        raise DivergedError(f"before the first update {found}{remedy}")


COLLAPSED_ENTROPY: Final = 0.1
"""Share of the first entropy below which the entropy counts as collapsed."""
LONGER: Final = 1.5
"""Multiple of the first mean length above which answers count as grown."""
REWARDED_LENGTH: Final = 0.5
"""Correlation of score and length above which length itself counts as rewarded."""


class AnswerWatch:
    """Warns once about an entropy collapse, and once about growing answers whose length correlates with the score.

    Attributes:
        state: State as JSON values, for checkpoints.

    Source: ``tests/rl/test_monitor.py``.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start without history; ``say`` prints a line for the user."""
        self._say = say
        self.state: dict[str, Any] = {"first": {}, "told": []}

    def check(self, figures: Mapping[str, Any], step: int) -> None:
        """Check the figures of a logged iteration, after ``step`` optimizer steps."""
        length, entropy, first = figures["objective/length"], figures.get("policy/entropy"), self.state["first"]
        first.setdefault("length", length)
        if entropy is not None and entropy < COLLAPSED_ENTROPY * first.setdefault("entropy", entropy):
            found = f"the entropy fell from {first['entropy']:.3g} to {entropy:.3g} nats per token"
            remedy = "a lower learning_rate, a higher KL coefficient or epsilon_high keeps answers diverse"
            self._warn_once("entropy", step, found, remedy)
        correlation = figures.get("objective/score_length_correlation", 0.0)
        if correlation > REWARDED_LENGTH and length > LONGER * first["length"]:
            found = f"answers grew from {first['length']:.3g} to {length:.3g} tokens, and longer ones earn more"
            remedy = f"their correlation is {correlation:.2f}; look at the best samples, or punish length"
            self._warn_once("length", step, found, remedy)

    def _warn_once(self, kind: str, step: int, found: str, remedy: str) -> None:
        if kind not in self.state["told"]:
            self.state["told"].append(kind)
            self._say(f"warning: step {step}: {found}: {remedy}")


def correlate(first: Tensor, second: Tensor) -> float:
    """Return the Pearson correlation of two tensors ``(B,)``; 0 if one of them is constant."""
    # Double precision: scores that differ little around a large mean would cancel in float32. torch.corrcoef would warn
    # of a single answer.
    centred = [values.double() - values.double().mean() for values in (first, second)]
    norm = float(centred[0].norm() * centred[1].norm())
    return float(centred[0] @ centred[1]) / norm if norm > 0 else 0.0


def measure_unique_grams(rollout: Rollout) -> float:
    """Return the share of 4-grams of an iteration's answers that occur once; 1 without any."""
    ids, width = rollout.response_ids, rollout.response_ids.shape[1] - _GRAM + 1
    if width < 1:
        return 1.0
    # Polynomial hashes in wrapping int64, (B, width): tuples of millions of tokens would take gigabytes.
    keys = torch.zeros_like(ids[:, :width])
    for place in range(_GRAM):
        keys = keys * _HASH_BASE + ids[:, place : place + width]
    keys = keys[torch.arange(width) <= rollout.lengths[:, None] - _GRAM]
    _, counts = torch.unique(keys, return_counts=True)
    return float((counts == 1).sum()) / len(keys) if len(keys) else 1.0


def describe_samples(
    answers: Rollout, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, reward_names: Collection[str]
) -> tuple[list[dict[str, Any]], Figures]:
    """Return each answer as a record of ``samples.jsonl``, and the metrics of all.

    A record has the score of its answer as ``reward``, ``None`` without one. The metrics are the rewards as in
    ``average_rewards``, ``eval_stop_rate`` and the mean length.
    """
    columns = (answers.finished, answers.lengths, answers.scores, answers.scored)
    rows = zip(answers.prompts, texts, *(column.tolist() for column in columns), strict=True)
    records = []
    for prompt, text, stopped, length, score, is_scored in rows:
        sample = Sample(str(tokenizer.decode(prompt.input_ids)), text, None, stopped=stopped, num_tokens=length)
        records.append({**asdict(sample), "reward": score if is_scored else None})
    return records, {
        **average_rewards("eval_reward", answers, reward_names),
        "eval_stop_rate": float(answers.finished.float().mean()),
        "eval_mean_sample_tokens": float(answers.lengths.float().mean()),
    }

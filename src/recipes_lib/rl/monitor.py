"""Metrics of an iteration, checks before its first update, and sample answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes_lib.errors import DivergedError
from recipes_lib.rl.advantages import compute_explained_variance, estimate_kl
from recipes_lib.rl.policy_loss import PolicyObjective, compute_importance_weights
from recipes_lib.rl.rollout import Rollout
from recipes_lib.training.evaluation.samples import Sample

Figures = dict[str, float]
"""Numbers by name."""

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Nats a token by which two passes of one model over the same answers may differ, in batches of other shapes."""
_GRAM: Final = 4


def describe_rollout(
    rollout: Rollout, reward_names: Collection[str], total: Tensor, objective: PolicyObjective
) -> Figures:
    """Return statistics of the answers of an iteration, before any update.

    Args:
        rollout: All answers.
        reward_names: Of the rewards, in their order.
        total: Sum of each answer's rewards, KL penalty and length penalty subtracted, ``(B,)``.
        objective: Of the policy: how tokens are weighted.
    """
    mask, lengths = rollout.mask, rollout.lengths.float()
    kl = torch.where(mask, estimate_kl(rollout.logps, rollout.ref_logps), 0.0)
    weights = compute_importance_weights(rollout.logps, rollout.engine_logps, mask, objective)
    gap = torch.where(mask, rollout.engine_logps - rollout.logps, 0.0)
    num_tokens = rollout.num_tokens
    prompt_lengths = [len(prompt.input_ids) for prompt in rollout.prompts]
    # As if all answers were one batch, padded to the longest.
    longest = max(p + int(n) for p, n in zip(prompt_lengths, rollout.lengths, strict=True))
    return {
        **average_rewards("objective/score", rollout, reward_names),
        **_describe_scores(rollout, total),
        "objective/kl_seq": float(kl.sum(dim=1).mean()),
        "objective/kl_token": float(kl.sum()) / num_tokens,
        "objective/finish_rate": float(rollout.finished.float().mean()),
        "objective/length": float(lengths.mean()),
        "objective/unique_4_grams": measure_variety(rollout),
        "rollout/engine_mismatch_kl": float(gap.sum()) / num_tokens,
        "rollout/is_weight_mean": float(weights.sum()) / num_tokens,
        "rollout/is_weight_max": float(weights.max()),
        "rollout/pad_fraction": 1 - (num_tokens + sum(prompt_lengths)) / (longest * len(rollout)),
    }


def average_rewards(name: str, rollout: Rollout, reward_names: Collection[str]) -> Figures:
    """Return the mean score as ``name``, and with several rewards each one as ``name/<reward>``.

    Each mean is over the answers that have the reward; a reward without any is omitted.
    """
    scores, means = rollout.scores[rollout.scored], rollout.rewards.nanmean(dim=0).tolist()
    parts = {f"{name}/{reward}": mean for reward, mean in zip(reward_names, means, strict=True) if not math.isnan(mean)}
    return ({name: float(scores.mean())} if len(scores) else {}) | (parts if len(means) > 1 else {})


def _describe_scores(rollout: Rollout, total: Tensor) -> Figures:
    """Further statistics of scored answers; empty without any."""
    scored = rollout.scored
    if not scored.any():
        return {}
    scores, lengths = rollout.scores[scored], rollout.lengths[scored].float()
    return {
        "objective/score_std": float(scores.std(unbiased=False)),
        "objective/reward_total": float(total[scored].mean()),
        "objective/score_length_correlation": correlate(scores, lengths),
    }


def describe_values(rollout: Rollout) -> Figures:
    """Return the explained variance of the critic's values in an iteration; empty if no answer is scored."""
    assert rollout.returns is not None
    mask = rollout.loss_mask
    if not mask.any():
        return {}
    return {
        "value/explained_var": compute_explained_variance(rollout.values, rollout.returns, mask),
        "value/mean": float(rollout.values[mask].mean()),
        "value/return_mean": float(rollout.returns[mask].mean()),
    }


def average_steps(prefix: str, steps: Sequence[Figures]) -> Figures:
    """Return the mean of each figure over an iteration's steps, and the number of updates; empty without steps."""
    if not steps:
        return {}
    names = [name for name in steps[0] if name not in ("ratio_max", "lr", "grad_norm")]
    figures = {name: sum(step[name] for step in steps) / len(steps) for name in names}
    norms = [step["grad_norm"] for step in steps if "grad_norm" in step]
    if norms:
        figures["grad_norm"] = sum(norms) / len(norms)
    if "ratio_max" in steps[0]:
        figures["ratio_max"] = max(step["ratio_max"] for step in steps)
    figures |= {"lr": steps[-1]["lr"], "num_updates": float(len(norms))}
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def verify_first_minibatch(kl: float, dtype: torch.dtype) -> None:
    """Check by ``approx_kl`` that the policy ratio is 1 before the first update of an iteration.

    Raises:
        DivergedError: The policy that learns is not the one whose answers were read.
    """
    # k3 of a small difference d is d^2 / 2.
    shift = (2 * max(kl, 0.0)) ** 0.5
    if not shift <= TOLERANCE[dtype]:
        raise DivergedError(
            f"before the first update of this iteration the policy's log-probabilities differ by {shift:.2g} nats a "
            f"token from those that it had just given; rounding explains {TOLERANCE[dtype]:g}"
        )


def verify_first_rollout(rollout: Rollout, dtype: torch.dtype) -> str:
    """Check that policy and reference are equal before the first update, and return a line with the result.

    Raises:
        DivergedError: It is not: KL to the reference is not 0.
    """
    shift = float((rollout.logps - rollout.ref_logps)[rollout.mask].abs().mean())
    if not shift <= TOLERANCE[dtype]:
        raise DivergedError(
            f"before the first update policy and reference differ by {shift:.2g} nats a token; rounding explains "
            f"{TOLERANCE[dtype]:g}"
        )
    return f"step 0: policy and reference differ by {shift:.1e} nats a token"


COLLAPSED_ENTROPY: Final = 0.1
"""Share of the first entropy below which answers are about to be all alike."""
LONGER: Final = 1.5
"""Multiple of the first length from which length is looked at."""
REWARDED_LENGTH: Final = 0.5
"""Correlation of score and length above which length is what earns."""


class AnswerWatch:
    """Warns once about an entropy collapse, and once about growing answers whose length correlates with the score.

    Attributes:
        state: JSON values from which a resumed run continues.

    Source: ``tests/rl/test_monitor.py``.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start without an iteration; ``say`` prints a line for the user."""
        self._say = say
        self.state: dict[str, Any] = {"first": {}, "told": []}

    def look(self, figures: Mapping[str, float | None], step: int) -> None:
        """Check the figures of a logged iteration, after ``step`` optimizer steps."""
        entropy, length, first = figures.get("policy/entropy"), figures.get("objective/length"), self.state["first"]
        for name, value in (("entropy", entropy), ("length", length)):
            if value is not None:
                first.setdefault(name, value)
        if entropy is not None and entropy < COLLAPSED_ENTROPY * first["entropy"]:
            found = f"the entropy fell from {first['entropy']:.3g} to {entropy:.3g} nats a token"
            remedy = "a lower learning_rate, a higher KL coefficient or epsilon_high keeps answers apart"
            self._tell("entropy", step, found, remedy)
        correlation = figures.get("objective/score_length_correlation")
        is_rewarded = correlation is not None and correlation > REWARDED_LENGTH
        if is_rewarded and length is not None and length > LONGER * first["length"]:
            found = f"answers grew from {first['length']:.3g} to {length:.3g} tokens, and longer ones earn more"
            remedy = f"their correlation is {correlation:.2f}; look at the best samples, or punish length"
            self._tell("length", step, found, remedy)

    def _tell(self, kind: str, step: int, found: str, remedy: str) -> None:
        if kind not in self.state["told"]:
            self.state["told"].append(kind)
            self._say(f"warning: step {step}: {found}: {remedy}")


def correlate(first: Tensor, second: Tensor) -> float:
    """Return the Pearson correlation of two ``(B,)``; 0 if one of them is constant."""
    # In double precision: scores that differ little around a large mean cancel in float32.
    centred = [values.double() - values.double().mean() for values in (first, second)]
    norm = float(centred[0].norm() * centred[1].norm())
    return float(centred[0] @ centred[1]) / norm if norm > 0 else 0.0


def measure_variety(rollout: Rollout) -> float:
    """Return the share of 4-grams of an iteration that occur once; 1 without any."""
    grams = Counter(
        tuple(ids[start : start + _GRAM])
        for ids, length in zip(rollout.response_ids.tolist(), rollout.lengths.tolist(), strict=True)
        for start in range(length - _GRAM + 1)
    )
    return sum(count == 1 for count in grams.values()) / grams.total() if grams else 1.0


def read_samples(
    answers: Rollout, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Sample, float | None]]:
    """Yield each answer as ``samples.jsonl`` shows it, with its score; ``None`` where no reward scores it."""
    for at, (prompt, text) in enumerate(zip(answers.prompts, texts, strict=True)):
        sample = Sample(
            prompt=str(tokenizer.decode(prompt.input_ids)),
            completion=text,
            reference=None,
            stopped=bool(answers.finished[at]),
            num_tokens=int(answers.lengths[at]),
        )
        yield sample, float(answers.scores[at]) if answers.scored[at] else None


def describe_samples(answers: Rollout, reward_names: Collection[str]) -> Figures:
    """Return the rewards as ``average_rewards`` does, ``eval_stop_rate`` and the mean length."""
    return {
        **average_rewards("eval_reward", answers, reward_names),
        "eval_stop_rate": float(answers.finished.float().mean()),
        "eval_mean_sample_tokens": float(answers.lengths.float().mean()),
    }

"""Preference losses (DPO and variants) and the reward-model loss, from log-probabilities or scores; in nats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

REFERENCE_FREE: Final = frozenset({"simpo", "orpo", "sft"})
"""Losses without reference log-probabilities: a run with only these needs no reference model."""
COMPARING: Final = frozenset({"aot", "aot_unpaired"})
"""Losses that compare pairs within one call, so that the micro-batch size changes the result."""


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """Options of the losses, in upstream's spelling (``trl.DPOConfig``; ``simpo_gamma`` as ``trl``'s ``CPOConfig``).

    ``check_preference`` of the configuration verifies that they go together with the losses.

    Attributes:
        beta: Scale of the log-ratios, above 0; tau of IPO, and the weight of the odds ratio in ORPO.
        label_smoothing: Expected fraction of pairs with a flipped preference, in ``[0, 0.5)``; ``exo_pair`` needs one
            above 0.
        f_divergence_type: ``reverse_kl``, ``forward_kl``, ``js_divergence`` or ``alpha_divergence``; others than the
            first are for losses of differences of scores, in which the normaliser of the divergence cancels.
        f_alpha_divergence_coef: Alpha of ``alpha_divergence``.
        discopop_tau: Temperature of DiscoPOP's mixture.
        simpo_gamma: Target reward margin of SimPO.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """Log-probabilities of the completions of ``P`` pairs, summed over tokens (``sum_logps``), ``float32 (P,)`` each.

    Attributes:
        chosen_logps: Log-probabilities of the chosen completions under the policy; differentiable.
        rejected_logps: Log-probabilities of the rejected completions under the policy; differentiable.
        num_chosen_tokens: Lengths of the chosen completions in tokens; ``(P,)``.
        num_rejected_tokens: Lengths of the rejected completions in tokens; ``(P,)``.
        ref_chosen_logps: ``chosen_logps`` under the reference model; ``None`` if no loss needs it.
        ref_rejected_logps: ``rejected_logps`` under the reference model; ``None`` if no loss needs it.
        chosen_nll: Negative log-likelihood of the chosen completions over all tokens, for ``sft`` and ``orpo``, if
            ``ld_alpha`` reduced the weight of some tokens in ``chosen_logps``. Default: ``-chosen_logps``.
        mean_chosen_tokens: Chosen tokens per pair over the whole step, for ``sft``; a scalar. Default: the mean of
            ``num_chosen_tokens``.
        weights: Factors on the losses of the pairs, without gradient (``compute_wpo_weights``); ``(P,)``.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    num_chosen_tokens: Tensor
    num_rejected_tokens: Tensor
    ref_chosen_logps: Tensor | None = None
    ref_rejected_logps: Tensor | None = None
    chosen_nll: Tensor | None = None
    mean_chosen_tokens: Tensor | None = None
    weights: Tensor | None = None


def sum_logps(logps: Tensor, sequence_ids: Tensor, num_sequences: int, *, ld_alpha: float | None = None) -> Tensor:
    """Sum token log-probabilities over each sequence, ``(num_sequences,)``, in nats.

    Args:
        logps: Token log-probabilities, ``float32 (N,)``; the tokens of a sequence in order, sequences in any order.
        sequence_ids: Sequence index of each token from 0, ``int64 (N,)``.
        num_sequences: Number of sequences; those without tokens sum to 0.
        ld_alpha: Factor on tokens of the longer completion of a pair beyond the length of the shorter one. It requires
            the chosen completions as the first half of the sequences and the rejected ones as the second.

    Source: LD-DPO (Liu et al. 2024, arXiv 2409.06411, eq. 11); ``tests/losses/test_preference.py`` by hand,
        ``tests/parity/test_preference_losses.py`` against TRL.
    """
    if ld_alpha is not None:
        # The rank of a token in its sequence is its rank among all tokens sorted by sequence, minus the start of its
        # sequence there. The sort is stable, so that tokens of a sequence keep their order.
        ones = torch.ones_like(logps)
        lengths = sum_logps(ones, sequence_ids, num_sequences)
        shorter = torch.minimum(*lengths.chunk(2)).repeat(2)
        order = sequence_ids.argsort(stable=True)
        is_beyond = torch.empty_like(sequence_ids, dtype=torch.bool)
        starts = lengths.cumsum(0) - lengths
        ordered_ids = sequence_ids[order]
        ranks = torch.arange(len(logps), device=logps.device) - starts[ordered_ids]
        is_beyond[order] = ranks >= shorter[ordered_ids]
        logps = logps * ones.masked_fill(is_beyond, ld_alpha)
    # index_add: no loop over sequences and no padding, so that their lengths need not be read from the device.
    return logps.new_zeros(num_sequences).index_add(0, sequence_ids, logps)


def compute_wpo_weights(logps: Tensor, log_sum_sq_probs: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """WPO weights of pairs, ``(num_sequences / 2,)``, without gradient: how likely both answers are under the policy.

    The weight of a token is its probability divided by ``sum_v p(v)^2``, that of a sequence the geometric mean over its
    tokens, that of a pair the product of its two sequences.

    Args:
        logps: Token log-probabilities under the policy, ``float32 (N,)``.
        log_sum_sq_probs: ``log sum_v p(v)^2`` at each token, ``float32 (N,)``.
        sequence_ids: Sequence index of each token, ``int64 (N,)``; all chosen completions before all rejected ones.
        num_sequences: Number of sequences, twice the number of pairs.

    Source: WPO (Zhou et al. 2024, arXiv 2406.11827, eq. 2) with sampled alignment, as ``trl.DPOTrainer``;
        ``tests/parity/test_preference_losses.py``.
    """
    aligned = logps.detach() - log_sum_sq_probs
    num_tokens = sum_logps(torch.ones_like(aligned), sequence_ids, num_sequences)
    means = sum_logps(aligned, sequence_ids, num_sequences) / num_tokens.clamp(min=1)
    chosen, rejected = means.chunk(2)
    return (chosen + rejected).exp()


def compute_preference_losses(
    names: Sequence[str], weights: Sequence[float], batch: PreferenceBatch, options: PreferenceOptions
) -> Tensor:
    """Loss of each pair, ``(P,)``: the weighted sum of the named losses.

    The caller sums over the pairs of a step and divides by their number over all processes and micro-batches. The
    result is then independent of gradient accumulation, except for ``aot`` and ``aot_unpaired``, which compare pairs
    within one call, and for ``sft`` without ``mean_chosen_tokens``.

    Args:
        names: Keys of ``PREFERENCE_LOSSES``.
        weights: Factor on each named loss.
        batch: Log-probabilities of the pairs.
        options: Options of the losses.

    Raises:
        ValueError: A loss needs reference log-probabilities that ``batch`` lacks.

    Source: each function of ``PREFERENCE_LOSSES`` names its paper; values and gradients are those of TRL's DPO trainer
        (``tests/parity/test_preference_losses.py``).
    """
    losses = [weight * PREFERENCE_LOSSES[name](batch, options) for name, weight in zip(names, weights, strict=True)]
    total = torch.stack(losses).sum(dim=0)
    return total if batch.weights is None else total * batch.weights


@torch.no_grad()
def compute_preference_metrics(batch: PreferenceBatch, beta: float) -> dict[str, Tensor]:
    """Metrics of each pair, ``float32 (P,)``, to be averaged over pairs: implicit rewards and log-probabilities.

    The implicit reward is ``beta`` times the log-ratio to the reference; without a reference, ``beta`` times the mean
    token log-probability, as in SimPO. ``rewards/accuracies`` is 1 where the chosen reward is strictly larger, so it is
    0 before the first update. ``logps/...`` are in nats per sequence, ``logps/..._per_token`` in nats per token.

    Source: ``trl.DPOTrainer``; ``tests/parity/test_preference_losses.py``.
    """
    means = _per_token(batch, batch.chosen_logps, batch.rejected_logps)
    is_free = batch.ref_chosen_logps is None
    chosen, rejected = (beta * figure for figure in (means if is_free else _log_ratios(batch)))
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "logps/chosen": batch.chosen_logps.detach(),
        "logps/rejected": batch.rejected_logps.detach(),
        "logps/chosen_per_token": means[0],
        "logps/rejected_per_token": means[1],
    }


def _reference(batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    if batch.ref_chosen_logps is None or batch.ref_rejected_logps is None:
        raise ValueError("this loss compares with a reference: ref_chosen_logps and ref_rejected_logps are missing")
    return batch.ref_chosen_logps, batch.ref_rejected_logps


def _log_ratios(batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Return ``log(policy / reference)`` of the chosen and the rejected completions, ``(P,)`` each."""
    ref_chosen, ref_rejected = _reference(batch)
    return batch.chosen_logps - ref_chosen, batch.rejected_logps - ref_rejected


def _per_token(batch: PreferenceBatch, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Divide values of the chosen and the rejected completions by their lengths."""
    return chosen / batch.num_chosen_tokens.clamp(min=1), rejected / batch.num_rejected_tokens.clamp(min=1)


def _scores(batch: PreferenceBatch, options: PreferenceOptions) -> tuple[Tensor, Tensor]:
    """Return ``f'(policy / reference)`` of both completions: f-DPO (Wang et al. 2023, arXiv 2309.16240)."""
    chosen, rejected = _log_ratios(batch)
    if options.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(chosen), math.log(2) + logsigmoid(rejected)
    # (t^(alpha - 1) - 1) / (alpha - 1): the reverse KL is the limit at 1, the forward KL the case 0.
    alpha = {"reverse_kl": 1.0, "forward_kl": 0.0}.get(options.f_divergence_type, options.f_alpha_divergence_coef)
    if alpha == 1:
        return chosen, rejected
    # exp(89) overflows float32; the clamp also keeps the gradient finite.
    chosen, rejected = (torch.expm1(((alpha - 1) * ratio).clamp(max=80)) / (alpha - 1) for ratio in (chosen, rejected))
    return chosen, rejected


def _gap(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """Return ``beta`` times the margin of the chosen over the rejected completion, ``(P,)``."""
    chosen, rejected = _scores(batch, options)
    return options.beta * (chosen - rejected)


def _mean_gap(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """Return the margin of the chosen over the rejected completion per token, ``(P,)``."""
    chosen, rejected = _per_token(batch, *_scores(batch, options))
    return chosen - rejected


def _smoothed(gap: Tensor, label_smoothing: float) -> Tensor:
    """Return the expectation of ``-log sigmoid(gap)`` if ``label_smoothing`` of the pairs are flipped."""
    return -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap)


def _chosen_nll(batch: PreferenceBatch) -> Tensor:
    return -batch.chosen_logps if batch.chosen_nll is None else batch.chosen_nll


def _sigmoid(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)."""
    return -logsigmoid(_gap(batch, options))


def _sigmoid_norm(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """Length-normalised DPO (Tulu 3, Lambert et al. 2024, arXiv 2411.15124)."""
    return -logsigmoid(options.beta * _mean_gap(batch, options))


def _hinge(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """SLiC-HF's hinge on DPO's margin (Liu et al. 2023, RSO, arXiv 2309.06657)."""
    return torch.relu(1 - _gap(batch, options))


def _ipo(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """IPO (Azar et al. 2023, arXiv 2310.12036, eq. 17), per token, as its authors advised TRL."""
    return (_mean_gap(batch, options) - 1 / (2 * options.beta)).square()


def _exo_pair(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """EXO for two answers (Ji et al. 2024, arXiv 2402.00856, eq. 16): KL(policy's preference || smoothed label)."""
    gap = _gap(batch, options)
    chosen = gap.sigmoid() * (logsigmoid(gap) - math.log1p(-options.label_smoothing))
    # label_smoothing > 0: the KL divergence to a hard label is infinite.
    rejected = (-gap).sigmoid() * (logsigmoid(-gap) - math.log(options.label_smoothing))
    return chosen + rejected


def _nca_pair(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """NCA for two answers (Chen et al. 2024, arXiv 2402.05369)."""
    chosen, rejected = (options.beta * ratio for ratio in _log_ratios(batch))
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409): unbiased if ``label_smoothing`` of pairs are flipped."""
    gap, flipped = _gap(batch, options), options.label_smoothing
    # label_smoothing < 1/2, so that the denominator is positive.
    return (flipped * logsigmoid(-gap) - (1 - flipped) * logsigmoid(gap)) / (1 - 2 * flipped)


def _bco_pair(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """BCO without its reward shift (Jung et al. 2024, arXiv 2404.04656)."""
    chosen, rejected = (options.beta * ratio for ratio in _log_ratios(batch))
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def _sppo_hard(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """SPPO with certain preferences (Wu et al. 2024, arXiv 2405.00675, eq. 4.7)."""
    chosen, rejected = _log_ratios(batch)
    return (chosen - 0.5 / options.beta).square() + (rejected + 0.5 / options.beta).square()


def _aot(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """AOT, paired (Melnyk et al. 2024, arXiv 2406.05882): sorted, the policy's margins exceed the reference's."""
    ref_chosen, ref_rejected = _reference(batch)
    margins, ref_margins = batch.chosen_logps - batch.rejected_logps, ref_chosen - ref_rejected
    return _smoothed(options.beta * (margins.sort().values - ref_margins.sort().values), options.label_smoothing)


def _aot_unpaired(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """AOT, unpaired (Melnyk et al. 2024, arXiv 2406.05882): sorted, chosen log-ratios exceed rejected ones."""
    chosen, rejected = _log_ratios(batch)
    return _smoothed(options.beta * (chosen.sort().values - rejected.sort().values), options.label_smoothing)


def _apo_zero(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7): the chosen up, the rejected down."""
    chosen, rejected = _log_ratios(batch)
    return (-options.beta * chosen).sigmoid() + (options.beta * rejected).sigmoid()


def _apo_down(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8): both down, the rejected further."""
    chosen, rejected = _log_ratios(batch)
    return (options.beta * chosen).sigmoid() + (options.beta * (rejected - chosen)).sigmoid()


def _discopop(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """DiscoPOP (Lu et al. 2024, arXiv 2406.08414, eq. 5): logistic where the gap is negative, exponential beyond."""
    gap = _gap(batch, options)
    # One exponential of the sum: as separate factors, one overflows where the other underflows.
    exponential = torch.exp(logsigmoid(gap / options.discopop_tau) - gap)
    return -logsigmoid(gap) * (-gap / options.discopop_tau).sigmoid() + exponential


def _sft(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """NLL of the chosen completion over the mean length: averaged over all pairs, it is in nats per token."""
    mean_tokens = (
        batch.num_chosen_tokens.float().mean() if batch.mean_chosen_tokens is None else batch.mean_chosen_tokens
    )
    return _chosen_nll(batch) / mean_tokens


def _simpo(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    chosen, rejected = _per_token(batch, batch.chosen_logps, batch.rejected_logps)
    return -logsigmoid(options.beta * (chosen - rejected) - options.simpo_gamma)


def _orpo(batch: PreferenceBatch, options: PreferenceOptions) -> Tensor:
    """ORPO (Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7), with likelihoods per token as in eq. 1."""
    nll = _chosen_nll(batch) / batch.num_chosen_tokens.clamp(min=1)
    chosen, rejected = _per_token(batch, batch.chosen_logps, batch.rejected_logps)
    return nll - options.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logp: Tensor) -> Tensor:
    """``log(p / (1 - p))`` from ``log p``."""
    # At p = 1 the odds are infinite, and in backward infinity times the zero of the sigmoid is NaN.
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


_ALL: Final[Sequence[Callable[[PreferenceBatch, PreferenceOptions], Tensor]]] = (
    *(_sigmoid, _hinge, _ipo, _exo_pair, _nca_pair, _robust, _bco_pair, _sppo_hard, _aot, _aot_unpaired),
    *(_apo_zero, _apo_down, _discopop, _sft, _sigmoid_norm, _simpo, _orpo),
)
PREFERENCE_LOSSES: Final = {loss.__name__.removeprefix("_"): loss for loss in _ALL}
"""``loss_type`` -> loss of each pair; names of TRL's DPO trainer, and ``simpo`` and ``orpo``."""


def compute_bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margins: Tensor | None = None,
    label_smoothing: float = 0.0,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Bradley-Terry loss of each pair in nats, ``(P,)``: ``-log sigmoid(chosen - rejected - margin)``, with centring.

    The caller sums over the pairs of a step and divides by their number over all processes and micro-batches, so that
    the result is independent of gradient accumulation.

    Args:
        chosen: Scores of the chosen answers in any floating dtype, ``(P,)``; the loss is ``float32`` at least.
        rejected: Scores of the rejected answers, ``(P,)``.
        margins: Target margin of each pair, ``(P,)``. Default: 0.
        label_smoothing: Expected fraction of pairs with a flipped label, in ``[0, 0.5)``.
        center_coefficient: Factor on ``(chosen + rejected)^2``, which keeps scores near 0; TRL's
            ``center_rewards_coefficient``.

    Source: ``trl.RewardTrainer.compute_loss``; margins: Llama 2 (Touvron et al. 2023, arXiv 2307.09288, eq. 2);
        centring: Eisenstein et al. 2023 (arXiv 2312.09244). ``tests/losses/test_reward.py``.
    """
    wide = torch.promote_types(chosen.dtype, torch.float32)
    chosen, rejected = chosen.to(wide), rejected.to(wide)
    gap = chosen - rejected if margins is None else chosen - rejected - margins
    return _smoothed(gap, label_smoothing) + center_coefficient * (chosen + rejected).square()

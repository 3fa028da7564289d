"""The loss of a reward model: how unlikely the labelled preferences are under its scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def compute_bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margins: Tensor | None = None,
    label_smoothing: float = 0.0,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Loss of each pair, ``(P,)``: ``-log sigmoid(chosen - rejected - margin)`` in nats, and what keeps scores near 0.

    The caller normalises: the sum over the pairs of a step divided by their number over all processes and
    micro-batches; how the step is cut then changes nothing.

    Args:
        chosen: Scores of the preferred answers, ``(P,)``, in any floating dtype; the loss is ``float32`` at least.
        rejected: Scores of the others, ``(P,)``.
        margins: By how much the preferred answer should lead, ``(P,)``. Default: 0.
        label_smoothing: Expected share of pairs whose label is the wrong way round.
        center_coefficient: Factor on ``(chosen + rejected)^2``; upstream's ``center_rewards_coefficient``.

    Raises:
        ValueError: ``label_smoothing`` is not in ``[0, 0.5)``: nothing could be learnt from such labels.

    Source: ``trl.RewardTrainer.compute_loss``; margins: Llama 2 (Touvron et al. 2023, arXiv 2307.09288, eq. 2);
        centring: Eisenstein et al. 2023 (arXiv 2312.09244). ``tests/losses/test_reward.py``.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), not {label_smoothing}")
    wide = torch.promote_types(chosen.dtype, torch.float32)
    chosen, rejected = chosen.to(wide), rejected.to(wide)
    gap = chosen - rejected if margins is None else chosen - rejected - margins
    losses = -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap)
    return losses + center_coefficient * (chosen + rejected).square()

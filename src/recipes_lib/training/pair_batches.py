"""Batches of pairs: what of them the model takes, and the log-probabilities of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from recipes_lib.losses.preference import sum_logps
from recipes_lib.models.shared_prompt import build_shared_prompt_mask

_INPUTS: Final = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PairScores:
    """What an objective makes of a batch of ``P`` pairs.

    Attributes:
        losses: Loss of each pair, ``float32 (P,)``, differentiable.
        figures: By name, ``float32 (P,)``: to be averaged over pairs.
        num_targets: Tokens that were predicted; ``int64`` scalar, 0 where none are.
        num_correct: Those of them that were the model's first choice; ``int64`` scalar.
        aux_loss: Load-balancing loss of a mixture of experts; ``None`` in a dense model.
    """

    losses: Tensor
    figures: Mapping[str, Tensor]
    num_targets: Tensor | int = 0
    num_correct: Tensor | int = 0
    aux_loss: Tensor | None = None

    def sums(self) -> dict[str, Tensor]:
        """Return the sum over pairs of the loss and of every figure; add them over batches, then divide."""
        return {name: values.detach().sum() for name, values in {"loss": self.losses, **self.figures}.items()}


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs in a batch."""
    return len(batch["num_completion_tokens"]) // 2


def read_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return what a model takes of a batch, on the model's device: tokens, and what keeps the answers apart.

    Args:
        model: Its configuration names the kernel that a mask is made for.
        batch: On any device.
    """
    device = next(model.parameters()).device
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if "pair_ids" in batch:
        config: Any = getattr(model, "module", model).config
        implementation = config.get_text_config()._attn_implementation
        pair_ids, branch_ids = batch["pair_ids"].to(device), batch["branch_ids"].to(device)
        inputs["attention_mask"] = build_shared_prompt_mask(pair_ids, branch_ids, implementation)
    return inputs


def split_sequences(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return whose each answer token is, all chosen answers before all rejected ones, and the answers' lengths.

    Args:
        batch: From ``PairCollator``, which numbers the two answers of a pair one after the other.
        device: Where they go.

    Returns:
        ``int64 (N,)`` in ``[0, 2P)``; and tokens of the chosen and of the rejected answers, ``int64 (P,)`` each.
    """
    sequence_ids, lengths = batch["sequence_ids"].to(device), batch["num_completion_tokens"].to(device)
    ids = sequence_ids // 2 + sequence_ids % 2 * (len(lengths) // 2)
    return ids, lengths[0::2], lengths[1::2]


def compute_answer_logps(model: nn.Module, batch: Batch, *, ld_alpha: float | None) -> Tensor:
    """Return the log-probability of each answer in nats, ``float32 (2, P)``: of the chosen ones, of the rejected ones.

    Args:
        model: With a loss head on it.
        batch: From ``PairCollator``.
        ld_alpha: As ``sum_logps``.
    """
    device = next(model.parameters()).device
    predictors, targets = batch["predictors"].to(device), batch["targets"].to(device)
    outputs = model(**read_inputs(model, batch), predictors=predictors, targets=targets, token_logps=True)
    ids, chosen, _ = split_sequences(batch, device)
    return sum_logps(outputs.logps, ids, 2 * len(chosen), ld_alpha=ld_alpha).view(2, -1)

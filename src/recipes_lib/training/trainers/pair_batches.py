"""Batches of preference pairs: model inputs, losses and metrics, log-probabilities of answers and their rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from recipes_lib.losses.preference import sum_logps
from recipes_lib.models.attention.shared_prompt import build_shared_prompt_mask
from recipes_lib.models.inference import find_device, measure_rounding

_ROUNDING: Final = {
    torch.float32: (3e-5, 3e-6),
    torch.float16: (5e-3, 5e-4),
    torch.bfloat16: (3e-2, 2e-3),
}
"""Rounding error of an answer's log-probability, in nats: coefficients of the square root of its tokens, and of its
tokens. Different batch shapes select different kernels; values are three times the largest measured difference."""

_INPUTS: Final = (
    *("input_ids", "position_ids", "token_mask"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "shared_prompt_index"),
)

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PairScores:
    """Losses and metrics of a batch of ``P`` pairs.

    Attributes:
        losses: Loss of each pair, ``float32 (P,)``, differentiable.
        figures: Metrics by name, ``float32 (P,)`` each, to be averaged over pairs.
        num_targets: Predicted tokens; ``int64`` scalar, 0 for a reward model.
        num_correct: Predicted tokens that are the model's argmax; ``int64`` scalar.
        aux_loss: Load-balancing loss of a mixture of experts; ``None`` in a dense model.
    """

    losses: Tensor
    figures: Mapping[str, Tensor]
    num_targets: Tensor | int = 0
    num_correct: Tensor | int = 0
    aux_loss: Tensor | None = None

    def sums(self) -> dict[str, Tensor]:
        """Return the sum of the loss and of every metric over all pairs; scalars.

        For means over several batches, add the sums, then divide by the number of pairs.
        """
        return {name: values.detach().sum() for name, values in {"loss": self.losses, **self.figures}.items()}


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs of a batch that count; they precede the others."""
    counted: int = batch.get("num_counted_pairs", len(batch["num_completion_tokens"]) // 2)
    return counted


def read_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the model inputs of a batch on the model's device: tokens, and masks or bounds that isolate answers.

    Args:
        model: A model with a loss or score head, which converts a ``bool`` mask (True: attends) for its kernel.
        batch: From ``build_pair_collator``, on any device.
    """
    device = find_device(model)
    inputs: dict[str, Any] = send_to_device({name: batch[name] for name in _INPUTS if name in batch}, device)
    if "pair_ids" in batch:
        pair_ids, branch_ids = batch["pair_ids"].to(device), batch["branch_ids"].to(device)
        inputs["attention_mask"] = build_shared_prompt_mask(pair_ids, branch_ids)
    return inputs


def compute_rounding(num_tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the allowed difference of two computations of an answer's log-probability, in nats; ``float32``.

    Args:
        num_tokens: Tokens of each answer, of any shape.
        dtype: Dtype that bounds the rounding error, from ``get_rounding_dtype``.
    """
    # Errors of tokens are partly independent (square root) and partly systematic (linear).
    per_root, per_token = _ROUNDING[dtype]
    return per_root * num_tokens.float().sqrt() + per_token * num_tokens


def measure_answer_rounding(
    model: nn.Module, score: Callable[[], Tensor], logps: Tensor, num_tokens: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the allowed difference of two computations of log-probabilities as ``compute_rounding``, ``float32``.

    In 16 bits it is larger for a model whose rounding errors are larger than those from which its coefficients are,
    as those of deep models are: they are measured on these answers. Every process must call.

    Args:
        model: The model that computes, with or without a wrapper.
        score: Computes ``logps``.
        logps: Log-probabilities of answers, of any shape.
        num_tokens: Tokens of each answer, of the same shape.
        dtype: As ``compute_rounding``.
    """
    roots = num_tokens.to(logps.device).float().sqrt()
    per_root = measure_rounding(model, lambda: score() / roots, logps / roots)
    return torch.maximum(compute_rounding(num_tokens.to(logps.device), dtype), per_root * roots)


def split_sequences(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the answer index of each answer token, chosen answers before rejected ones, and the answers' lengths.

    Args:
        batch: From ``PairCollator``, whose ``sequence_ids`` alternate between chosen and rejected answers.
        device: Device of the results.

    Returns:
        Answer index of each of the ``N`` answer tokens, ``int64 (N,)`` in ``[0, 2P)``; tokens of the chosen and of the
        rejected answers, ``int64 (P,)`` each.
    """
    sequence_ids, lengths = batch["sequence_ids"].to(device), batch["num_completion_tokens"].to(device)
    # Collator: chosen 0, rejected 1, chosen 2 ... Losses: chosen 0 to P - 1, rejected P to 2P - 1.
    ids = sequence_ids // 2 + sequence_ids % 2 * (len(lengths) // 2)
    return ids, lengths[0::2], lengths[1::2]


def compute_answer_logps(model: nn.Module, batch: Batch, *, ld_alpha: float | None) -> Tensor:
    """Return the log-probability of each answer in nats, ``float32 (2, P)``: row 0 chosen, row 1 rejected.

    Args:
        model: A causal language model with a loss head.
        batch: From ``PairCollator``.
        ld_alpha: As ``sum_logps``.
    """
    device = find_device(model)
    predictors, targets = batch["predictors"].to(device), batch["targets"].to(device)
    outputs = model(**read_inputs(model, batch), predictors=predictors, targets=targets, token_logps=True)
    ids, chosen, _ = split_sequences(batch, device)
    return sum_logps(outputs.logps, ids, 2 * len(chosen), ld_alpha=ld_alpha).view(2, -1)

"""Batches of pairs: model inputs, log-probabilities of the answers, and the choice of layout and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.pairs.collator import PairCollator, PairLayout
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.preference import sum_logps
from recipes_lib.models.attention.kernels import choose_attention, prove_isolation
from recipes_lib.models.attention.shared_prompt import (
    build_shared_prompt_bounds,
    build_shared_prompt_mask,
    prove_shared_prompt,
    supports_shared_prompt,
)
from recipes_lib.models.inference import find_device

_ROUNDING: Final = {
    torch.float32: (3e-5, 3e-6),
    torch.float16: (5e-3, 5e-4),
    torch.bfloat16: (3e-2, 2e-3),
}
"""By how much two computations of an answer's log-probability differ, in nats: for the root of its tokens, and for each
of them. Beside other rows other kernels run; measured, with three times as much allowed."""

_INPUTS: Final = (
    *("input_ids", "position_ids", "token_mask"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PairScores:
    """Losses and metrics of a batch of ``P`` pairs.

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

    def sums(self, num_pairs: int | None = None) -> dict[str, Tensor]:
        """Return the sum over pairs, or over the first ``num_pairs``, of the loss and of every figure.

        Add them over batches, then divide.
        """
        return {
            name: values[:num_pairs].detach().sum() for name, values in {"loss": self.losses, **self.figures}.items()
        }


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs in a batch that count: the first so many."""
    counted: int = batch.get("num_counted_pairs", len(batch["num_completion_tokens"]) // 2)
    return counted


def read_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the model inputs of a batch on the model's device: tokens, and what isolates the answers.

    Args:
        model: With a head on it that takes a ``bool`` mask and spells it for the kernel, or a kernel that takes bounds.
        batch: On any device.
    """
    device = find_device(model)
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    if "part_lengths" in batch:
        inputs |= build_shared_prompt_bounds(batch["part_lengths"].cpu())
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if "pair_ids" in batch:
        pair_ids, branch_ids = batch["pair_ids"].to(device), batch["branch_ids"].to(device)
        inputs["attention_mask"] = build_shared_prompt_mask(pair_ids, branch_ids, "sdpa")
    return inputs


def compute_rounding(num_tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how much two computations of the same log-probability of an answer may differ, in nats; ``float32``.

    Args:
        num_tokens: Of each answer.
        dtype: Precision of the products.
    """
    of_root, of_each = _ROUNDING[dtype]
    return of_root * num_tokens.float().sqrt() + of_each * num_tokens


def split_sequences(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return whose each answer token is, all chosen answers before all rejected ones, and the answers' lengths.

    Args:
        batch: From ``PairCollator``, which numbers the two answers of a pair one after the other.
        device: Where they go.

    Returns:
        ``int64 (N,)`` in ``[0, 2P)``; and tokens of the chosen and of the rejected answers, ``int64 (P,)`` each.
    """
    sequence_ids, lengths = batch["sequence_ids"].to(device), batch["num_completion_tokens"].to(device)
    # Collator: chosen 0, rejected 1, chosen 2 ... Losses: chosen 0 to P - 1, rejected P to 2P - 1.
    ids = sequence_ids // 2 + sequence_ids % 2 * (len(lengths) // 2)
    return ids, lengths[0::2], lengths[1::2]


def compute_answer_logps(model: nn.Module, batch: Batch, *, ld_alpha: float | None) -> Tensor:
    """Return the log-probability of each answer in nats, ``float32 (2, P)``: of the chosen ones, of the rejected ones.

    Args:
        model: With a loss head on it.
        batch: From ``PairCollator``.
        ld_alpha: As ``sum_logps``.
    """
    device = find_device(model)
    predictors, targets = batch["predictors"].to(device), batch["targets"].to(device)
    outputs = model(**read_inputs(model, batch), predictors=predictors, targets=targets, token_logps=True)
    ids, chosen, _ = split_sequences(batch, device)
    return sum_logps(outputs.logps, ids, 2 * len(chosen), ld_alpha=ld_alpha).view(2, -1)


@dataclass(frozen=True, slots=True)
class PairAttention:
    """Attention kernel and batch layout of pairs.

    Attributes:
        implementation: ``attn_implementation``.
        layout: As ``PairCollator``.
        packing: Whether several documents share a row.
        reason: Why prompts are not shared, or pairs not packed; empty where they are, or where that was asked for.
    """

    implementation: str
    layout: PairLayout
    packing: bool = True
    reason: str = ""


def choose_pair_attention(
    config: RecipeConfig, model_config: PreTrainedConfig, args: TrainingArguments, *, max_length: int
) -> PairAttention:
    """Choose the cheapest batch layout that the model supports, by its configuration.

    Args:
        config: The run; ``shared_prompt`` asks for one copy of each prompt or forbids it.
        model_config: Of the model.
        args: Device and precision.
        max_length: Tokens of the longest prompt with one answer.

    Raises:
        ConfigError: ``shared_prompt`` is true and cannot be; or the kernel cannot be had.
    """
    obstacle, reason = "", None
    try:
        choice = choose_attention(config.model, model_config, args, packing=True)
    except ConfigError as error:
        choice = choose_attention(config.model, model_config, args, packing=False)
        obstacle = error.problems[0].found
    is_flat = choice.layout == "flat"
    if config.preference.shared_prompt is not False:
        reason = supports_shared_prompt(model_config, choice.implementation, max_length=max_length)
        if reason is None:
            return PairAttention(choice.implementation, "shared_flat" if is_flat else "shared")
        if config.preference.shared_prompt:
            raise _refuse(config, reason)
    layout: PairLayout = "flat" if is_flat and not obstacle else "separate"
    return PairAttention(choice.implementation, layout, packing=not obstacle, reason=reason or obstacle)


def prove_pair_attention(
    config: RecipeConfig, attention: PairAttention, model: Any, *, max_length: int = 0
) -> PairAttention:
    """Verify on the loaded model that answers and pairs are isolated; fall back if they are not.

    Args:
        config: The run.
        attention: From ``choose_pair_attention``.
        model: As it will be trained, or a reference.
        max_length: Tokens of the longest prompt with one answer, where ``attention`` was chosen for another model.

    Raises:
        ConfigError: ``shared_prompt`` is true and leaks; or documents see each other, and the kernel takes no others.
    """
    if attention.layout.startswith("shared"):
        reason = supports_shared_prompt(model.config, attention.implementation, max_length=max_length)
        reason = reason or prove_shared_prompt(model)
        if reason is None:
            return attention
        if config.preference.shared_prompt:
            raise _refuse(config, reason)
        is_flat = attention.layout == "shared_flat"
        attention = replace(attention, layout="flat" if is_flat else "separate", reason=reason)
    if attention.packing:
        try:
            prove_isolation(model, "flat" if attention.layout == "flat" else "rows")
        except ConfigError as error:
            if attention.layout == "flat":
                where = config.provenance.get("attn_implementation", "attn_implementation")
                raise ConfigError(Problem(where, error.problems[0].found, "use sdpa or eager")) from error
            # Alone in its row, a document has nobody to see.
            attention = replace(attention, packing=False, reason=attention.reason or error.problems[0].found)
    return attention


def build_pair_collator(tokenizer: PreTrainedTokenizerBase, attention: PairAttention) -> PairCollator:
    """Build the collator of the verified layout."""
    return PairCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout, packing=attention.packing)


def _refuse(config: RecipeConfig, reason: str) -> ConfigError:
    where = config.provenance.get("shared_prompt", "shared_prompt")
    return ConfigError(Problem(where, f"prompts cannot be shared: {reason}", "delete the line, or write false"))

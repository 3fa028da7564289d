"""Preference pairs: the trainer of DPO and reward models, its batch layout and attention, and the reward loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments
from trl import RewardConfig

from recipes_lib.config.schema import PreferenceConfig, RecipeConfig
from recipes_lib.data.pairs.collator import PairCollator, PairLayout
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.preference import compute_bradley_terry
from recipes_lib.models.attention.kernels import choose_attention, verify_isolation
from recipes_lib.models.attention.shared_prompt import (
    build_shared_prompt_bounds,
    prove_shared_prompt,
    supports_shared_prompt,
)
from recipes_lib.models.inference import find_device
from recipes_lib.training.trainers.pair_batches import Batch, PairScores, count_pairs, read_inputs
from recipes_lib.training.trainers.recipe_trainer import BatchLoss, RecipeTrainer


@dataclass(frozen=True, slots=True)
class PairAttention:
    """Attention kernel and batch layout of pairs.

    Attributes:
        implementation: Value of ``attn_implementation``.
        layout: Batch layout of ``PairCollator``.
        packing: Whether several documents share a row.
        reason: Why the model does not support shared prompts or packing; empty if it does, or if it is disabled.
    """

    implementation: str
    layout: PairLayout
    packing: bool = True
    reason: str = ""


def choose_pair_attention(
    config: RecipeConfig, model_config: PreTrainedConfig, args: TrainingArguments, *, max_length: int
) -> PairAttention:
    """Choose the cheapest batch layout that the model supports according to its configuration.

    Args:
        config: The run; ``shared_prompt`` requires or disables one copy of the prompt for both answers of a pair.
        model_config: The model's configuration.
        args: Device and compute dtype.
        max_length: Tokens of the longest prompt with one answer.

    Raises:
        ConfigError: ``shared_prompt`` is true and the model does not support it.
        ConfigError: As ``choose_attention``.
    """
    problem = ""
    try:
        choice = choose_attention(config.model, model_config, args, packing=True)
    except ConfigError as error:
        choice = choose_attention(config.model, model_config, args, packing=False)
        problem = error.problems[0].found
    is_flat = choice.layout == "flat"
    reason = find_sharing_obstacle(config, model_config, choice.implementation, max_length=max_length)
    if reason is None:
        return PairAttention(choice.implementation, "shared_flat" if is_flat else "shared")
    layout: PairLayout = "flat" if is_flat and not problem else "separate"
    return PairAttention(choice.implementation, layout, packing=not problem, reason=reason or problem)


def find_sharing_obstacle(
    config: RecipeConfig, model_config: PreTrainedConfig, implementation: str, *, max_length: int
) -> str | None:
    """Return why a prompt is computed once for each answer; ``None`` if both share it, empty if the run disables it.

    Args:
        config: The run.
        model_config: The model's configuration.
        implementation: Attention kernel.
        max_length: Tokens of the longest prompt with one answer.

    Raises:
        ConfigError: ``shared_prompt`` is true and the model does not support it.
    """
    if config.preference.shared_prompt is False:
        return ""
    reason = supports_shared_prompt(model_config, implementation, max_length=max_length)
    if reason is not None and config.preference.shared_prompt:
        raise _refuse(config, reason)
    return reason


def verify_pair_attention(
    config: RecipeConfig, attention: PairAttention, model: Any, *, max_length: int = 0
) -> PairAttention:
    """Verify on the loaded model that answers and pairs are isolated; fall back to another layout if they are not.

    Args:
        config: The run.
        attention: From ``choose_pair_attention``.
        model: The policy or a reference, not yet wrapped.
        max_length: Tokens of the longest prompt with one answer, for a reference of another architecture.

    Returns:
        The verified layout, with the reason for a fallback.

    Raises:
        ConfigError: ``shared_prompt`` is true and answers attend to each other.
        ConfigError: Packed documents attend to each other, and the kernel supports no other layout.
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
            verify_isolation(model, "flat" if attention.layout == "flat" else "rows")
        except ConfigError as error:
            if attention.layout == "flat":
                where = config.locate("attn_implementation")
                raise ConfigError(Problem(where, error.problems[0].found, "use sdpa or eager")) from error
            # One document per row needs no isolation.
            attention = replace(attention, packing=False, reason=attention.reason or error.problems[0].found)
    return attention


def build_pair_collator(
    tokenizer: PreTrainedTokenizerBase, attention: PairAttention
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    """Return the collator of the verified layout: ``PairCollator``, with the bounds of ``shared_flat``."""
    collate = PairCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout, packing=attention.packing)
    return partial(_collate, collate)


def _collate(collate: PairCollator, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    batch = collate(rows)
    # Here, on the host: numbers that depend on tensors of the device would synchronise with it.
    parts = batch.pop("part_lengths", None)
    return batch if parts is None else batch | build_shared_prompt_bounds(parts)


def _refuse(config: RecipeConfig, reason: str) -> ConfigError:
    where = config.locate("shared_prompt")
    return ConfigError(Problem(where, f"prompts cannot be shared: {reason}", "delete the line, or write false"))


class PairTrainer(RecipeTrainer):
    """``RecipeTrainer`` whose objective is a mean over pairs; its ``data_collator`` is from ``build_pair_collator``.

    The loss of a step, including the last of an epoch, does not depend on micro-batch size and number of ranks
    (``tests/distributed/test_pairs.py``).

    Attributes:
        score_pairs: Returns losses and metrics of a batch of pairs.
    """

    def __init__(self, *, score: Callable[[nn.Module, Batch], PairScores], **kwargs: Any) -> None:
        """Initialise the trainer.

        Args:
            score: Scorer of a batch of pairs, such as ``score_rewards`` of a model with a score head.
            **kwargs: As ``RecipeTrainer``.
        """
        self.score_pairs = score
        super().__init__(**kwargs)

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the number of pairs that count; ``int64`` scalar."""
        return torch.tensor(count_pairs(batch))

    def mask_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch without pairs that count, for the collectives of other ranks only."""
        return {**batch, "num_counted_pairs": 0, "num_tokens": torch.zeros_like(batch["num_tokens"])}

    def score_batch(self, model: nn.Module, inputs: dict[str, Any]) -> BatchLoss:
        """Return the loss of the pairs that count."""
        scores, counted = self.score_pairs(model, inputs), count_pairs(inputs)
        num_targets, num_correct = (scores.num_targets, scores.num_correct) if counted else (0, 0)
        figures = {name: values[:counted].detach().sum() for name, values in scores.figures.items()}
        loss_sum = scores.losses[:counted].sum()
        return BatchLoss(loss_sum, counted, num_targets, num_correct, scores.aux_loss, figures)


def score_rewards(
    model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0, center_coefficient: float = 0.0
) -> PairScores:
    """Score a batch of pairs by the Bradley-Terry loss on the difference of scores, minus ``margin`` if pairs have one.

    Args:
        model: The reward model, with a score head (``add_score_head``).
        batch: From ``PairCollator``.
        label_smoothing: Assumed share of pairs with swapped labels, in [0, 0.5).
        center_coefficient: Weight of the squared sum of a pair's scores.

    Source: ``trl.RewardTrainer``; losses and gradient norms are equal on the same pairs
    (``tests/parity/test_reward.py``).
    """
    device = find_device(model)
    outputs = model(**read_inputs(model, batch), last_positions=batch["last_positions"].to(device))
    # (2P,): chosen and rejected answers alternate.
    chosen, rejected = outputs.scores[0::2], outputs.scores[1::2]
    margins = batch["margin"].to(device) if "margin" in batch else None
    options = {"label_smoothing": label_smoothing, "center_coefficient": center_coefficient}
    figures = {
        "rewards/chosen": chosen.detach(),
        "rewards/rejected": rejected.detach(),
        "rewards/margins": (chosen - rejected).detach(),
        "rewards/accuracies": (chosen > rejected).float(),
    }
    losses = compute_bradley_terry(chosen, rejected, margins=margins, **options)
    return PairScores(losses=losses, figures=figures, aux_loss=outputs.aux_loss)


def build_reward_score(args: RewardConfig, config: PreferenceConfig) -> partial[PairScores]:
    """Return ``score_rewards`` with the keys of TRL's ``RewardConfig`` and of this library."""
    center_coefficient = args.center_rewards_coefficient or 0.0
    return partial(score_rewards, label_smoothing=config.label_smoothing, center_coefficient=center_coefficient)

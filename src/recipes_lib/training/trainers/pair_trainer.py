"""Pairwise training: the trainer that DPO and reward models share, and the reward model's."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trl import RewardConfig

from recipes_lib.config.schema import PreferenceConfig
from recipes_lib.losses.preference import compute_bradley_terry
from recipes_lib.models.inference import find_device
from recipes_lib.training.trainers.pair_batches import Batch, PairScores, count_pairs, read_inputs
from recipes_lib.training.trainers.recipe_trainer import BatchLoss, RecipeTrainer


class PairTrainer(RecipeTrainer):
    """``RecipeTrainer`` whose objective is a mean over pairs; its ``data_collator`` is from ``build_pair_collator``.

    The loss of a step, including the last of an epoch, does not depend on micro-batch size and number of ranks
    (``tests/distributed/test_pairs.py``).
    """

    @abstractmethod
    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Return losses and metrics of a batch of pairs."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardObjective:
    """Bradley-Terry loss on the difference of scores, minus the pair's ``margin`` if it has one.

    Attributes:
        label_smoothing: Assumed share of pairs with swapped labels, in [0, 0.5).
        center_coefficient: Weight of the squared sum of a pair's scores.
    """

    label_smoothing: float = 0.0
    center_coefficient: float = 0.0

    def score(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch of pairs.

        Args:
            model: The reward model, with a score head.
            batch: From ``PairCollator``.
        """
        device = find_device(model)
        outputs = model(**read_inputs(model, batch), last_positions=batch["last_positions"].to(device))
        # (2P,): chosen and rejected answers alternate.
        chosen, rejected = outputs.scores[0::2], outputs.scores[1::2]
        margins: Tensor | None = batch["margin"].to(device) if "margin" in batch else None
        losses = compute_bradley_terry(
            chosen,
            rejected,
            margins=margins,
            label_smoothing=self.label_smoothing,
            center_coefficient=self.center_coefficient,
        )
        figures = {
            "rewards/chosen": chosen.detach(),
            "rewards/rejected": rejected.detach(),
            "rewards/margins": (chosen - rejected).detach(),
            "rewards/accuracies": (chosen > rejected).float(),
        }
        return PairScores(losses=losses, figures=figures, aux_loss=outputs.aux_loss)


def build_reward_objective(args: RewardConfig, config: PreferenceConfig) -> RewardObjective:
    """Build the objective from the keys of TRL's ``RewardConfig`` and of this library."""
    return RewardObjective(
        label_smoothing=config.label_smoothing, center_coefficient=args.center_rewards_coefficient or 0.0
    )


class RewardTrainer(PairTrainer):
    """``PairTrainer`` with the loss of ``RewardObjective``.

    Source: ``trl.RewardTrainer``; losses and gradient norms are equal on the same pairs
    (``tests/parity/test_reward.py``).
    """

    def __init__(self, *, objective: RewardObjective, **kwargs: Any) -> None:
        """Initialise the trainer.

        Args:
            objective: The loss.
            **kwargs: As ``PairTrainer``; ``model`` has a score head (``add_score_head``).
        """
        self.objective: RewardObjective = objective
        super().__init__(**kwargs)

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Return losses and metrics of a batch of pairs."""
        return self.objective.score(model, batch)

"""Reward models: one score an answer, learnt from which of two was preferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from trl import RewardConfig

from recipes_lib.config.schema import PreferenceConfig
from recipes_lib.losses.preference import compute_bradley_terry
from recipes_lib.models.devices import find_device
from recipes_lib.training.trainers.pair_batches import Batch, PairScores, read_inputs
from recipes_lib.training.trainers.pair_trainer import PairTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardObjective:
    """Bradley-Terry: the chosen answer should have the higher score, by the pair's ``margin`` where it has one.

    Attributes:
        label_smoothing: Share of pairs that are expected to be labelled the wrong way round.
        center_coefficient: Factor on the squared sum of a pair's scores.
    """

    label_smoothing: float = 0.0
    center_coefficient: float = 0.0

    def score(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch of pairs.

        Args:
            model: With a score head on it.
            batch: From ``PairCollator``.
        """
        device = find_device(model)
        outputs = model(**read_inputs(model, batch), last_positions=batch["last_positions"].to(device))
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
    """Build the objective of a run from upstream's keys and ours."""
    return RewardObjective(
        label_smoothing=config.label_smoothing, center_coefficient=args.center_rewards_coefficient or 0.0
    )


class RewardTrainer(PairTrainer):
    """``PairTrainer`` with the loss of ``RewardObjective``.

    Source: ``trl.RewardTrainer``, whose losses and gradient norms it has on the same pairs;
    ``tests/parity/test_reward.py``.
    """

    def __init__(self, *, objective: RewardObjective, **kwargs: Any) -> None:
        """Set the trainer up.

        Args:
            objective: The loss.
            **kwargs: As ``PairTrainer``; ``model`` has a score head (``add_score_head``).
        """
        self.objective: RewardObjective = objective
        super().__init__(**kwargs)

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Score a batch."""
        return self.objective.score(model, batch)

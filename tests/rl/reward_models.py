"""Reward models that know what they are told, and no more."""

from __future__ import annotations

import torch

from recipes_lib.models.heads.scoring import RewardModel


def read_the_end(reward_model: RewardModel, ends: list[str]) -> None:
    """Make a Llama score an answer by its last token alone: above 1 where that is one of ``ends``, and 0 elsewhere."""
    model, ids = reward_model.model, reward_model.tokenizer.convert_tokens_to_ids(ends)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight[ids] = 1.0
        model.score.weight.fill_(2 / model.score.in_features)

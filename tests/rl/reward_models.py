"""Reward models with random heads, or with weights set by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.models.heads.scoring import RewardModel


def write_reward_model(folder: Path, base: Path) -> Path:
    """Save a base model with a random score head, and its tokenizer."""
    model = load_reward_model(ModelConfig(model_name_or_path=str(base)), "sdpa", seed=0)
    add_score_head(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def read_the_end(reward_model: RewardModel, ends: list[str]) -> None:
    """Set weights of a Llama so that the score is above 1 if the last token is one of ``ends``, and otherwise 0."""
    model, ids = reward_model.model, reward_model.tokenizer.convert_tokens_to_ids(ends)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight[ids] = 1.0
        model.score.weight.fill_(2 / model.score.in_features)

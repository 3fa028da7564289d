"""Saved matplotlib figures, and a tiny reward model."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerFast

from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.models.heads.scoring import RewardModel


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every saved matplotlib figure; nothing is rendered, which takes nearly all of the time of a page."""
    saved: list[Figure] = []

    def record(figure: Figure, target: Path | io.StringIO, **_: object) -> None:
        saved.append(figure)
        if isinstance(target, io.StringIO):
            target.write("<svg></svg>")

    monkeypatch.setattr(Figure, "savefig", record)
    return saved


@pytest.fixture
def reward_model(tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> RewardModel:
    """Tiny model with a random score head."""
    model = load_reward_model(ModelConfig(model_name_or_path=str(tiny_model_dir)), "sdpa", seed=0)
    add_score_head(model)
    return RewardModel(model, tiny_tokenizer)

"""Reward-model trajectory against TRL's ``RewardTrainer`` on the same pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from tests.parity import trl_runs
from tests.training.pairs import make_pairs, make_reward_trainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig

from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.heads.score_head import load_reward_model
from recipes_lib.training.trainers.pair_trainer import score_rewards

SHARED = trl_runs.PAIRS | {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "center_rewards_coefficient": 0.01,
}
PAD = 1


@pytest.fixture(scope="module")
def start_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head, from which both trainers start."""
    folder = tmp_path_factory.mktemp("start")
    model = load_reward_model(ModelConfig(model_name_or_path=str(tiny_model_dir)), "sdpa", seed=0)
    model.config.pad_token_id = PAD
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def train_trl(start_dir: Path, folder: Path, pairs: Dataset) -> list[dict[str, float]]:
    rows = [pairs[number] for number in range(len(pairs))]
    whole = {
        f"{name}_ids": [[*row["prompt_ids"].tolist(), *row[f"{name}_ids"].tolist()] for row in rows]
        for name in ("chosen", "rejected")
    }
    if "margin" in pairs.column_names:
        whole["margin"] = [float(row["margin"]) for row in rows]
    model = AutoModelForSequenceClassification.from_pretrained(start_dir, num_labels=1)
    arguments = partial(RewardConfig, max_length=None, **SHARED)
    return trl_runs.train_trl(trl.RewardTrainer, arguments, model, start_dir, Dataset.from_dict(whole), folder)


@pytest.mark.parametrize(("layout", "has_margins"), [("shared", True), ("separate", False)])
def test_reward_losses_and_gradient_norms_equal_trl(start_dir, tmp_path, layout, has_margins):
    pairs = make_pairs()
    if has_margins:
        pairs = pairs.add_column("margin", [0.1 * number for number in range(len(pairs))]).with_format("numpy")
    expected = train_trl(start_dir, tmp_path / "trl", pairs)
    score = partial(score_rewards, center_coefficient=SHARED["center_rewards_coefficient"])
    trainer, recorder = make_reward_trainer(start_dir, tmp_path / "ours", pairs, layout=layout, score=score, **SHARED)
    trainer.train()
    got = recorder.steps
    assert len(got) == SHARED["max_steps"]
    trl_runs.assert_same_steps(expected, got)

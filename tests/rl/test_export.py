"""Saved critics and reward models, read by this library, transformers, OpenRLHF and verl."""

from __future__ import annotations

import pytest
import torch
from tests.rl import keys_task
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)

from recipes_lib.config.loader import load_config
from recipes_lib.models.heads.scoring import RewardModel, RewardStatistics, store_reward_statistics
from recipes_lib.rl.state import save_critic

IDS = torch.tensor([keys_task.draw_prompts(1, seed=3)[0]])
POSITIONS = {"position_ids": torch.arange(IDS.shape[1])[None]}


class RegressionModel(LlamaPreTrainedModel):
    """Model as built by OpenRLHF's ``get_llm_for_sequence_regression``."""

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()

    def compute_values(self, ids):
        values = self.score(self.model(ids).last_hidden_state).squeeze(-1)
        return (values - self.config.mean) / self.config.std


@pytest.fixture
def load(policy_dir, prompts_file, tmp_path):
    def load_models(**keys):
        flags = keys_task.build_flags(policy_dir, tmp_path / "out", prompts_file, **keys)
        loaded = keys_task.load(load_config("ppo", flags))
        return loaded.models, loaded.tokenizer

    return load_models


def read_values(critic):
    with torch.no_grad():
        return critic(input_ids=IDS, **POSITIONS, last_positions=torch.arange(IDS.shape[1])).scores


@pytest.fixture
def saved(load, tmp_path):
    """Folder of a critic with a random head and a bias, and its values."""
    models, tokenizer = load()
    critic = models.critic
    nn.init.normal_(critic.score.weight)
    critic.score.bias = nn.Parameter(torch.full((1,), 0.75))
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / ".tmpVRU6HF").write_bytes(b"unfinished weights of a killed process")
    save_critic(critic, tokenizer, tmp_path / "critic")
    return tmp_path / "critic", read_values(critic)


def test_saved_critic_has_no_unfinished_file(saved):
    folder, _ = saved
    assert not list(folder.glob(".*"))


def test_saved_critic_initialises_critic_of_another_run(saved, load):
    folder, values = saved
    models, _ = load(critic_model_name_or_path=folder)
    torch.testing.assert_close(read_values(models.critic), values)


def test_saved_critic_loads_in_transformers(saved):
    folder, values = saved
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        logit = model(input_ids=IDS).logits[0, 0]
    torch.testing.assert_close((logit - model.config.reward_mean) / model.config.reward_std, values[-1])


def test_saved_critic_loads_in_openrlhf(saved):
    folder, values = saved
    model, report = RegressionModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model.compute_values(IDS)[0], values)


def test_saved_critic_loads_in_verl_without_its_bias(saved):
    folder, values = saved
    config = AutoConfig.from_pretrained(folder)
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = AutoModelForTokenClassification.from_pretrained(folder, config=config)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits[0, :, 0] + 0.75, values)


def test_reward_model_statistics_are_read_by_openrlhf(load, tmp_path):
    models, tokenizer = load()
    critic = models.critic
    nn.init.normal_(critic.score.weight)
    store_reward_statistics(critic, RewardStatistics(mean=0.5, std=2.0))
    critic.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    own = RewardModel.load(tmp_path / "reward")
    raw = own.compute_raw_scores([IDS[0].tolist()])[0]
    model = RegressionModel.from_pretrained(tmp_path / "reward")
    with torch.no_grad():
        assert float(model.compute_values(IDS)[0, -1]) == pytest.approx((raw - 0.5) / 2.0, abs=1e-5)

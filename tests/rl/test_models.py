"""The layouts: what is trained by whom, where the critic starts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.rl import keys_task
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters import add_adapter
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.models.scoring import RewardModel, RewardStatistics, store_reward_statistics
from recipes_lib.rl.models import load_actor_critic
from recipes_lib.training.arguments import build_training_arguments
from recipes_lib.training.launch import read_launch

IDS = torch.tensor([[10, 11, 2, 3, 2, 2, 1]])
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(7)[None], "last_positions": torch.arange(7)}


@pytest.fixture
def load(policy_dir, prompts_file, tmp_path):
    def load_models(**keys):
        config = load_config("ppo", keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
        launch = read_launch()
        args = build_training_arguments(config, launch, has_eval=True)
        return load_actor_critic(config, args, launch, load_tokenizer(config.model, config.tokens), [7])

    return load_models


@pytest.fixture
def reward_model_dir(policy_dir, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1)
    folder = tmp_path / "reward_model"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_dir).save_pretrained(folder)
    return folder, model.eval()


def test_four_models_of_their_own(load):
    models = load()
    assert not models.is_shared
    assert models.stop_ids == [keys_task.EOS, 7]
    assert models.policy_parameters().keys() == dict(models.policy.named_parameters()).keys()
    assert not {id(p) for p in models.policy_parameters().values()} & {id(p) for p in models.own_reference.parameters()}
    assert not any(p.requires_grad for p in models.own_reference.parameters())
    with torch.no_grad(), models.as_critic() as critic:
        assert not critic(**INPUTS).scores.any()
    assert models.drop_critic() is models.policy


def test_two_adapters_on_one_trunk(load):
    models = load(use_peft=True, lora_r=4)
    assert models.is_shared
    policy, critic = models.policy_parameters(), models.critic_parameters()
    assert all("lora_" in name for name in policy)
    assert {name for name in critic if "lora_" not in name} == {"head.weight", "head.bias"}
    assert not {id(p) for p in policy.values()} & {id(p) for p in critic.values()}
    trained = [p for p in [*models.policy.parameters(), *models.critic.parameters()] if p.requires_grad]
    assert len(policy) + len(critic) == len(trained)
    assert list(models.drop_critic().peft_config) == ["default"]


@pytest.mark.parametrize("key", ["reward_model_name_or_path", "critic_model_name_or_path"])
def test_a_critic_from_a_reward_model_says_its_score_everywhere(load, reward_model_dir, key):
    folder, reward_model = reward_model_dir
    models = load(**{key: folder})
    with torch.no_grad(), models.as_critic() as critic:
        values = critic(**INPUTS).scores
        expected = reward_model.score(reward_model.model(input_ids=IDS).last_hidden_state)[0, :, 0]
    torch.testing.assert_close(values, expected)
    assert values.std() > 0


def test_a_critic_from_a_reward_model_with_a_scale_says_its_rewards(load, reward_model_dir):
    folder, reward_model = reward_model_dir
    store_reward_statistics(reward_model, RewardStatistics(mean=0.7, std=2.5))
    reward_model.save_pretrained(folder)
    with torch.no_grad(), load(reward_model_name_or_path=folder).as_critic() as critic:
        value = critic(**INPUTS).scores[-1]
    (raw,) = RewardModel.load(folder).compute_raw_scores([IDS[0].tolist()])
    assert float(value) == pytest.approx((raw - 0.7) / 2.5, abs=1e-6)


def test_a_critic_does_not_start_from_an_adapter(load, policy_dir, tmp_path):
    adapter = tmp_path / "adapter"
    base = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1)
    add_adapter(base, AdapterConfig(use_peft=True), seed=0, task_type="SEQ_CLS").save_pretrained(adapter)
    with pytest.raises(ConfigError, match="which is an adapter"):
        load(reward_model_name_or_path=adapter)
    load(reward_model_name_or_path=adapter, critic_model_name_or_path=policy_dir)


def test_a_critic_that_reads_other_tokens_is_refused(load, tmp_path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="vocabulary of 50 tokens"):
        load(critic_model_name_or_path=tmp_path / "other")


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}])
def test_activation_checkpointing_changes_no_gradient(load, keys):
    gradients = []
    for is_on in (False, True):
        models = load(activation_checkpointing=is_on, **keys)
        models.set_training(training=True)
        with models.as_policy() as policy:
            policy(input_ids=IDS, labels=IDS).loss.backward()
        with models.as_critic() as critic:
            ((critic(**INPUTS).scores - 1) ** 2).sum().backward()
        gradients.append([p.grad for p in [*models.policy_parameters().values(), *models.critic_parameters().values()]])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)

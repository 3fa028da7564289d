"""Loading of policy, critic, reference and reward model: trained parameters, initialisation, errors."""

from __future__ import annotations

import json

import pytest
import torch
from tests.rl import keys_task
from tests.rl.reward_adapters import write_reward_adapter
from tests.rl.reward_models import write_reward_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.roles import drop_scorers
from recipes_lib.models.heads.scoring import RewardModel, RewardStatistics, encode_answers, store_reward_statistics

IDS = torch.tensor([[10, 11, 2, 3, 2, 2, 1]])
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(7)[None], "last_positions": torch.arange(7)}


@pytest.fixture
def load(policy_dir, prompts_file, tmp_path):
    def load_models(**keys):
        config = load_config("ppo", keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
        return keys_task.load(config, [7]).models

    return load_models


@pytest.fixture
def reward_model_dir(policy_dir, tmp_path):
    folder = write_reward_model(tmp_path / "reward_model", policy_dir)
    return folder, AutoModelForSequenceClassification.from_pretrained(folder)


@pytest.fixture
def reward_adapter_dir(policy_dir, tmp_path):
    return write_reward_adapter(policy_dir, tmp_path / "reward adapter")


def test_separate_models_share_no_parameters(load, monkeypatch):
    verified = []
    monkeypatch.setattr("recipes_lib.rl.models.verify_loss_head", verified.append)
    models = load()
    assert verified == [models.policy]
    assert not models.is_shared
    assert models.stop_ids == [keys_task.EOS, 7]
    assert models.policy_parameters().keys() == dict(models.policy.named_parameters()).keys()
    assert not {id(p) for p in models.policy_parameters().values()} & {id(p) for p in models.own_reference.parameters()}
    assert not any(p.requires_grad for p in models.own_reference.parameters())
    with torch.no_grad(), models.using("critic") as critic:
        assert not critic(**INPUTS).scores.any()


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}])
def test_kl_coef_of_zero_loads_no_reference(load, keys):
    models = load(kl_coef=0, **keys)
    assert models.own_reference is None
    assert not models.has_reference


def test_adapters_share_one_base(load):
    models = load(use_peft=True, lora_r=4)
    assert models.is_shared
    policy, critic = models.policy_parameters(), models.critic_parameters()
    assert all("lora_" in name for name in policy)
    assert {name for name in critic if "lora_" not in name} == {"head.weight", "head.bias"}
    assert not {id(p) for p in policy.values()} & {id(p) for p in critic.values()}
    trained = [p for p in [*models.policy.parameters(), *models.critic.parameters()] if p.requires_grad]
    assert len(policy) + len(critic) == len(trained)
    drop_scorers(models.policy)
    assert list(models.policy.peft_config) == ["default"]


def test_saved_adapter_is_trained_further_without_a_reference(policy_dir, prompts_file, tmp_path):
    keys = {"use_peft": True, "lora_r": 4, "max_steps": 4, "learning_rate": 5e-3, "beta": 0}
    first = keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path / "a", prompts_file, **keys), "grpo")
    first.policy.save_pretrained(tmp_path / "adapter")
    keys |= {"adapter_name_or_path": tmp_path / "adapter", "lora_r": 16}
    flags = keys_task.build_group_flags(policy_dir, tmp_path / "b", prompts_file, **keys)
    second = keys_task.load(load_config("grpo", flags)).models
    assert not second.has_reference
    with torch.no_grad(), second.policy.disable_adapter():
        base = second.policy(input_ids=IDS).logits
    with torch.no_grad(), first.using("policy") as saved, second.using("policy") as loaded:
        torch.testing.assert_close(loaded(input_ids=IDS).logits, saved(input_ids=IDS).logits)
        assert (loaded(input_ids=IDS).logits - base).abs().max() > 0.01
    trained = keys_task.train(flags, "grpo").policy_parameters()
    before = second.policy_parameters()
    assert trained.keys() == before.keys()
    assert all(bool((trained[name] != before[name]).any()) for name in before)


@pytest.mark.parametrize("key", ["reward_model_name_or_path", "critic_model_name_or_path"])
def test_critic_from_reward_model_has_its_score_at_every_position(load, reward_model_dir, key):
    folder, reward_model = reward_model_dir
    models = load(**{key: folder})
    with torch.no_grad(), models.using("critic") as critic:
        values = critic(**INPUTS).scores
        expected = reward_model.score(reward_model.model(input_ids=IDS).last_hidden_state)[0, :, 0]
    torch.testing.assert_close(values, expected)
    assert values.std() > 0


def test_critic_from_reward_model_applies_its_statistics(load, reward_model_dir):
    folder, reward_model = reward_model_dir
    store_reward_statistics(reward_model, RewardStatistics(mean=0.7, std=2.5))
    reward_model.save_pretrained(folder)
    with torch.no_grad(), load(reward_model_name_or_path=folder).using("critic") as critic:
        value = critic(**INPUTS).scores[-1]
    (raw,) = RewardModel.load(folder).compute_raw_scores([IDS[0].tolist()])
    assert float(value) == pytest.approx((raw - 0.7) / 2.5, abs=1e-6)


def test_separate_critic_cannot_start_from_adapter(load, reward_adapter_dir, policy_dir):
    with pytest.raises(ConfigError, match="which is an adapter"):
        load(reward_model_name_or_path=reward_adapter_dir)
    models = load(reward_model_name_or_path=reward_adapter_dir, critic_model_name_or_path=policy_dir)
    assert models.reward is None


def test_shared_critic_starts_with_rewards_or_zero(load, reward_adapter_dir, policy_dir):
    alone = RewardModel.load(reward_adapter_dir)
    (raw,) = alone.compute_raw_scores([IDS[0].tolist()])
    adapters = {"use_peft": True, "lora_r": 4}
    for keys in ({"reward_model_name_or_path": reward_adapter_dir}, {"critic_model_name_or_path": reward_adapter_dir}):
        with torch.no_grad(), load(**adapters, **keys).using("critic") as critic:
            values = critic(**INPUTS).scores
        assert float(values[-1]) == pytest.approx((raw - 0.7) / 2.5, abs=1e-5)
        assert values.std() > 0
    both = {"reward_model_name_or_path": reward_adapter_dir, "critic_model_name_or_path": policy_dir}
    with torch.no_grad(), load(**adapters, **both).using("critic") as critic:
        assert not critic(**INPUTS).scores.any()


def test_shared_reward_model_uses_its_own_chat_template(load, reward_adapter_dir):
    tokenizer = AutoTokenizer.from_pretrained(reward_adapter_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ 'w20 ' + m['content'] + ' <eos>' }}{% endfor %}"
    tokenizer.save_pretrained(reward_adapter_dir)
    chat = [{"role": "user", "content": "k1 k2"}, {"role": "assistant", "content": "k2"}]
    models = load(use_peft=True, lora_r=4, reward_model_name_or_path=reward_adapter_dir)
    ids = [20, 3, 4, 1, 20, 4, 1]
    assert encode_answers(models.reward.tokenizer, [chat]) == [ids]
    (raw,) = RewardModel.load(reward_adapter_dir).compute_raw_scores([ids])
    assert models.reward.score([chat]) == pytest.approx([(raw - 0.7) / 2.5], abs=1e-5)


def test_reward_model_on_another_base_is_loaded_separately(load, reward_adapter_dir, reward_model_dir, tmp_path):
    folder, _ = reward_model_dir
    assert load(use_peft=True, reward_model_name_or_path=folder).reward is None
    settings = json.loads((reward_adapter_dir / "adapter_config.json").read_text())
    (reward_adapter_dir / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "another")})
    )
    assert load(use_peft=True, reward_model_name_or_path=reward_adapter_dir).reward is None
    with pytest.raises(ConfigError, match=r"cannot start from another model: .* was trained on .*another"):
        load(use_peft=True, critic_model_name_or_path=reward_adapter_dir)
    with pytest.raises(ConfigError, match="is no adapter"):
        load(use_peft=True, critic_model_name_or_path=folder)


def test_reward_adapter_without_statistics_raises(load, reward_adapter_dir):
    (reward_adapter_dir / "reward_scale.json").unlink()
    with pytest.raises(ConfigError, match=r"has no valid reward_scale\.json"):
        load(use_peft=True, reward_model_name_or_path=reward_adapter_dir)


def test_critic_with_another_vocabulary_raises(load, tmp_path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="vocabulary of 50 tokens"):
        load(critic_model_name_or_path=tmp_path / "other")


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}])
def test_experts_have_no_load_balancing_loss(load, policy_dir, tmp_path, keys):
    dense = LlamaConfig.from_pretrained(policy_dir).to_diff_dict()
    config = MixtralConfig(**{**dense, "model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True})
    MixtralForCausalLM(config).save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(policy_dir).save_pretrained(tmp_path / "experts")
    models = load(model_name_or_path=tmp_path / "experts", **keys)
    with models.using("policy") as policy:
        at = {"predictors": torch.arange(7), "targets": IDS[0], "token_logps": True}
        assert policy(input_ids=IDS, position_ids=INPUTS["position_ids"], **at).aux_loss is None
    with models.using("critic") as critic:
        assert critic(**INPUTS).aux_loss is None


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}])
def test_activation_checkpointing_preserves_gradients(load, keys):
    gradients = []
    for is_on in (False, True):
        models = load(activation_checkpointing=is_on, **keys)
        models.set_training(training=True)
        with models.using("policy") as policy:
            policy(input_ids=IDS, labels=IDS).loss.backward()
        with models.using("critic") as critic:
            ((critic(**INPUTS).scores - 1) ** 2).sum().backward()
        gradients.append([p.grad for p in [*models.policy_parameters().values(), *models.critic_parameters().values()]])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_only_every_second_layer_is_recomputed_if_asked_for(load):
    models = load(activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    for model in (models.policy, models.critic):
        assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]

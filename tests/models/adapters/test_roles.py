"""Policy, reference, critic and reward model as adapters on one shared base."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.adapter_models import save_model
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward, drop_scorers, role
from recipes_lib.models.heads.loss_head import add_loss_head

IDS = torch.arange(1, 9)[None]
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(8)[None]}
EVERYWHERE = {**INPUTS, "last_positions": torch.arange(8)}


@pytest.fixture
def base_dir(tmp_path):
    return save_model("llama", tmp_path)


@pytest.fixture
def trunk(base_dir):
    model = LlamaForCausalLM.from_pretrained(base_dir)
    base = copy.deepcopy(model).eval()
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4), seed=0)
    add_loss_head(model)
    return base, adapted, add_critic(adapted)


def save_scorer(base_dir, folder, **keys):
    """Save a random adapter with a score head; return its folder and its scores by plain transformers and PEFT."""
    base = AutoModelForSequenceClassification.from_pretrained(base_dir, num_labels=1)
    adapted = add_adapter(base, AdapterConfig(use_peft=True, lora_r=3, **keys), seed=1, task_type="SEQ_CLS").eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) / 4)
        scores = adapted.base_model.score(adapted.base_model.model.model(**INPUTS).last_hidden_state)[0, :, 0]
    adapted.save_pretrained(folder)
    return folder, scores


def train(adapted, critic, num_steps=3):
    """Update policy and critic in their roles, as PPO does."""
    own = [p for n, p in adapted.named_parameters() if p.requires_grad and f".{CRITIC}." not in n]
    others = [p for n, p in adapted.named_parameters() if f".{CRITIC}." in n]
    policy, values = (torch.optim.SGD(group, lr=0.5) for group in (own, [*others, *critic.parameters()]))
    for _ in range(num_steps):
        with role(adapted, "policy"):
            adapted(input_ids=IDS, labels=IDS).loss.backward()
            policy.step()
        with role(adapted, "critic"):
            ((critic(**EVERYWHERE).scores - 1) ** 2).sum().backward()
            values.step()
        policy.zero_grad()
        values.zero_grad()


def test_reference_logits_equal_base_bitwise_after_updates(trunk):
    base, adapted, critic = trunk
    train(adapted, critic)
    with torch.no_grad():
        expected = base(input_ids=IDS).logits
        with role(adapted, "reference"):
            assert torch.equal(adapted(input_ids=IDS).logits, expected)
        with role(adapted, "policy"):
            assert not torch.allclose(adapted(input_ids=IDS).logits, expected)


def test_policy_and_critic_updates_are_independent(trunk):
    _, adapted, critic = trunk

    def read():
        with torch.no_grad():
            with role(adapted, "policy"):
                logits = adapted(input_ids=IDS).logits
            with role(adapted, "critic"):
                return logits, critic(**EVERYWHERE).scores

    before = read()
    assert not before[1].any()
    critic.requires_grad_(False)
    with role(adapted, "policy"):
        adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert {name for name, p in adapted.named_parameters() if p.grad is not None and f".{CRITIC}." in name} == set()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if f".{CRITIC}." in name:
                parameter.add_(0.1)
        critic.head.weight.add_(0.1)
    logits, values = read()
    assert torch.equal(logits, before[0])
    assert values.any()


@pytest.mark.parametrize("name", ["policy", "critic", "reference", "reward"])
def test_roles_restore_requires_grad_and_active_adapter(trunk, name, base_dir, tmp_path):
    _, adapted, _ = trunk
    add_reward(adapted, save_scorer(base_dir, tmp_path / "scorer")[0])
    flags = {n: p.requires_grad for n, p in adapted.named_parameters()}
    assert any(flag for n, flag in flags.items() if f".{CRITIC}." in n)
    active, modes = adapted.active_adapter, [module.training for module in adapted.modules()]
    with role(adapted, name):
        assert {n: p.requires_grad for n, p in adapted.named_parameters()} == flags
        with role(adapted, "critic"):
            pass
        assert adapted.active_adapter == (name if name in (CRITIC, REWARD) else active)
    with pytest.raises(RuntimeError), role(adapted, name):
        raise RuntimeError
    assert {n: p.requires_grad for n, p in adapted.named_parameters()} == flags
    assert adapted.active_adapter == active
    assert [module.training for module in adapted.modules()] == modes


@pytest.mark.parametrize("keys", [{}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"])
def test_saved_reward_adapter_scores_equally_on_shared_base(trunk, base_dir, tmp_path, keys):
    base, adapted, critic = trunk
    folder, expected = save_scorer(base_dir, tmp_path / "scorer", **keys)
    num_before = sum(p.numel() for p in adapted.parameters())
    reward = add_reward(adapted, folder)
    train(adapted, critic)
    scores = reward(**EVERYWHERE).scores
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert not scores.requires_grad
    # No second trunk: rank 3 in each of the fourteen linear layers, and DoRA's magnitudes.
    added = {name: p for name, p in adapted.named_parameters() if f".{REWARD}." in name}
    assert sum(p.numel() for p in adapted.parameters()) - num_before == sum(p.numel() for p in added.values())
    sizes = [sum(m.weight.shape) for m in base.model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(p.numel() for name, p in added.items() if "lora_A" in name or "lora_B" in name) == 3 * sum(sizes)
    assert not any(p.requires_grad for p in [*added.values(), *reward.parameters()])


def test_critic_starts_from_saved_reward_adapter_and_trains_separately(base_dir, tmp_path):
    folder, expected = save_scorer(base_dir, tmp_path / "scorer")
    model = LlamaForCausalLM.from_pretrained(base_dir)
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4), seed=0)
    add_loss_head(model)
    critic, reward = add_critic(adapted, folder), add_reward(adapted, folder)
    torch.testing.assert_close(critic(**EVERYWHERE).scores, expected, atol=1e-5, rtol=1e-5)
    train(adapted, critic)
    assert not torch.allclose(critic(**EVERYWHERE).scores, expected, atol=1e-2)
    torch.testing.assert_close(reward(**EVERYWHERE).scores, expected, atol=1e-5, rtol=1e-5)
    drop_scorers(adapted)
    assert list(adapted.peft_config) == ["default"]
    drop_scorers(adapted)


def test_adapter_without_score_head_is_refused_as_reward_model(trunk, base_dir, tmp_path):
    _, adapted, _ = trunk
    causal = add_adapter(LlamaForCausalLM.from_pretrained(base_dir), AdapterConfig(use_peft=True), seed=0)
    causal.save_pretrained(tmp_path / "causal")
    with pytest.raises(ConfigError, match=r"score\.weight"):
        add_reward(adapted, tmp_path / "causal")


def test_reward_adapter_of_another_rank_than_its_configuration_is_refused(trunk, base_dir, tmp_path):
    _, adapted, _ = trunk
    folder, _ = save_scorer(base_dir, tmp_path / "scorer")
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 3', '"r": 6'))
    with pytest.raises(ConfigError, match="disagree about"):
        add_reward(adapted, folder)

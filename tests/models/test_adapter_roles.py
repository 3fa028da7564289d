"""Policy, critic and reference on one trunk: each is itself, and none disturbs the others."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapter_roles import CRITIC, AdapterCritic, role
from recipes_lib.models.adapters import add_adapter

IDS = torch.arange(1, 9)[None]
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(8)[None]}


@pytest.fixture
def trunk():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    alone = copy.deepcopy(model).eval()
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4), seed=0)
    return alone, adapted, AdapterCritic(adapted)


def train(adapted, critic, num_steps=3):
    """Update both, each in its role, as PPO does."""
    own = [p for n, p in adapted.named_parameters() if p.requires_grad and f".{CRITIC}." not in n]
    others = [p for n, p in adapted.named_parameters() if f".{CRITIC}." in n]
    policy, values = (torch.optim.SGD(group, lr=0.5) for group in (own, [*others, *critic.parameters()]))
    for _ in range(num_steps):
        with role(adapted, "policy"):
            adapted(input_ids=IDS, labels=IDS).loss.backward()
            policy.step()
        with role(adapted, "critic"):
            ((critic(**INPUTS, last_positions=torch.arange(8)).scores - 1) ** 2).sum().backward()
            values.step()
        policy.zero_grad()
        values.zero_grad()


def test_the_reference_is_the_base_exactly_also_after_updates(trunk):
    alone, adapted, critic = trunk
    train(adapted, critic)
    with torch.no_grad():
        expected = alone(input_ids=IDS).logits
        with role(adapted, "reference"):
            assert torch.equal(adapted(input_ids=IDS).logits, expected)
        with role(adapted, "policy"):
            assert not torch.allclose(adapted(input_ids=IDS).logits, expected)


def test_what_one_learns_does_not_move_the_other(trunk):
    _, adapted, critic = trunk

    def read():
        with torch.no_grad():
            with role(adapted, "policy"):
                logits = adapted(input_ids=IDS).logits
            with role(adapted, "critic"):
                return logits, critic(**INPUTS, last_positions=torch.arange(8)).scores

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


@pytest.mark.parametrize("name", ["policy", "critic", "reference"])
def test_flags_and_the_active_adapter_are_what_they_were(trunk, name):
    _, adapted, _ = trunk
    flags = {n: p.requires_grad for n, p in adapted.named_parameters()}
    assert any(flag for n, flag in flags.items() if f".{CRITIC}." in n)
    active, modes = adapted.active_adapter, [module.training for module in adapted.modules()]
    with role(adapted, name):
        assert {n: p.requires_grad for n, p in adapted.named_parameters()} == flags
        with role(adapted, "critic"):
            pass
        assert adapted.active_adapter == (CRITIC if name == "critic" else active)
    with pytest.raises(RuntimeError), role(adapted, name):
        raise RuntimeError
    assert {n: p.requires_grad for n, p in adapted.named_parameters()} == flags
    assert adapted.active_adapter == active
    assert [module.training for module in adapted.modules()] == modes

"""Decoder layers: mapping of student to teacher layers, and collection of hidden states and attention by hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
)

from recipes_lib.errors import ConfigError
from recipes_lib.models.structure import collect_features, find_layers, find_shared_rope, map_layers, verify_layers

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def build_llama(num_layers: int = 3) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers, attn_implementation="eager"))


def build_gpt2(num_layers: int = 3) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": num_layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager"))


@pytest.mark.parametrize(
    ("num_student", "num_teacher", "expected"),
    [
        (6, 12, (2, 4, 6, 8, 10, 12)),
        (4, 10, (3, 5, 8, 10)),  # Half up: Python would round 2.5 to 2.
        (3, 3, (1, 2, 3)),
        (1, 7, (7,)),
        (4, 2, (1, 1, 2, 2)),
    ],
)
def test_map_layers_is_even_and_rounds_half_up(num_student, num_teacher, expected) -> None:
    assert map_layers(num_student, num_teacher) == expected


def test_map_layers_increases_to_last_layer() -> None:
    for num_teacher in range(1, 40):
        for num_student in range(1, num_teacher + 1):
            mapped = map_layers(num_student, num_teacher)
            assert mapped[-1] == num_teacher
            assert len(set(mapped)) == num_student
            assert all(abs(at - number * num_teacher / num_student) <= 0.5 for number, at in enumerate(mapped, start=1))


@pytest.mark.parametrize("make", [build_llama, build_gpt2])
def test_collected_features_equal_model_outputs(make) -> None:
    model = make().eval()
    ids = torch.randint(0, 64, (2, 7))
    with collect_features(model, states=[1, 3], attentions=[2]) as features:
        own = model(input_ids=ids, output_hidden_states=True, output_attentions=True)
    assert features.states.keys() == {1, 3}
    assert features.attentions.keys() == {2}
    for number, states in features.states.items():
        assert torch.equal(states, own.hidden_states[number])
    assert torch.equal(features.attentions[2], own.attentions[1])
    model(input_ids=ids[:1])
    assert features.states[1].shape[0] == 2, "hooks are removed"
    verify_layers(model, attentions=True)
    assert len(find_layers(model)) == 3


def test_read_states_reduces_collected_states() -> None:
    model = build_llama()
    with collect_features(model, states=[2], read_states=lambda states: states[:, -1]) as features:
        model(input_ids=torch.randint(0, 64, (2, 7)))
    assert features.states[2].shape == (2, 16)


def test_features_and_gradients_under_activation_checkpointing() -> None:
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = build_llama().train()
        if recomputes:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        with collect_features(model, states=[1, 2, 3], attentions=[2]) as features:
            logits = model(input_ids=torch.arange(14).view(2, 7), use_cache=False).logits
        states = sum(states[:, 2:].square().sum() for states in features.states.values())
        (logits.square().mean() + states + features.attentions[2].square().sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


def test_verify_layers_refuses_states_that_differ_from_layers(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager")
    verify_layers(model, attentions=True)
    original = model.base_model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        *first, last = output.hidden_states
        output.hidden_states = (*first, last + 1)
        return output

    model.base_model.forward = forward
    with pytest.raises(ConfigError, match="are not the hidden states"):
        verify_layers(model, attentions=True)


def test_layers_without_attention_are_refused() -> None:
    model = build_llama()
    for layer in model.model.layers:
        layer.self_attn = torch.nn.Identity()
    with (
        pytest.raises(ConfigError, match="no attention module whose output could be collected"),
        collect_features(model, states=[1], attentions=[1]),
    ):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_model_without_layer_list_is_refused() -> None:
    model = build_llama()
    model.config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match="no list of its 5 layers"):
        find_layers(model)
    with pytest.raises(ConfigError, match="no list of its 0 layers"):
        find_layers(build_llama(0))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}


@pytest.mark.parametrize("longest", [8, 12])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=8),
        LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=8, rope_parameters=DYNAMIC),
        Phi3Config(
            **SIZES,
            num_hidden_layers=2,
            pad_token_id=0,
            max_position_embeddings=32,
            original_max_position_embeddings=8,
            rope_parameters=LONGROPE,
        ),
    ],
    ids=["default", "dynamic", "longrope"],
)
def test_shared_rotary_frequencies_are_told(config, longest) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(1, 64, (2, longest))
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :6], use_cache=False).logits
        beside = model(input_ids=ids, use_cache=False).logits[:1, :6]
    changes = not torch.allclose(alone, beside, atol=1e-5)
    assert changes == (find_shared_rope(config, longest) is not None)

"""Loading of the trained model: weights, dtype, adapter, dropout and score head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.training.pairs import Setting, build_config, train_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.config.schema import AdapterConfig, QuantizationConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_policy, load_scorer

LAUNCH = read_launch()
FRESH = AdapterConfig(use_peft=True, lora_r=4)


def build(model_dir, tmp_path, setting=None, **training):
    config = build_config(model_dir, tmp_path / "run", setting or Setting(), **training)
    return config, build_training_arguments(config, LAUNCH, has_eval=False)


def load(model_dir, tmp_path, setting=None, implementation="sdpa", **training):
    config, args = build(model_dir, tmp_path, setting, **training)
    return load_policy(config, implementation, args, LAUNCH)


@pytest.fixture
def with_dropout(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.3)
    model.save_pretrained(tmp_path / "with dropout")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "with dropout")
    return tmp_path / "with dropout"


def score_twice(model):
    ids = torch.arange(4, 36)[None]
    with torch.no_grad():
        return [model.train()(input_ids=ids).logits for _ in range(2)]


def test_policy_is_loaded_in_training_mode_with_given_kernel(tiny_model_dir, tmp_path):
    expected = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    for implementation in ("sdpa", "eager"):
        model = load(tiny_model_dir, tmp_path, implementation=implementation)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert model.config._attn_implementation == implementation
    half = load(tiny_model_dir, tmp_path, Setting(dtype="bfloat16"))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_disable_dropout(with_dropout, tmp_path):
    once, again = score_twice(load(with_dropout, tmp_path))
    assert torch.equal(once, again)
    once, again = score_twice(load(with_dropout, tmp_path, disable_dropout=False))
    assert not torch.equal(once, again)
    adapted = Setting(adapter=replace(FRESH, lora_dropout=0.5))
    once, again = score_twice(load(with_dropout, tmp_path, adapted))
    assert torch.equal(once, again)


def test_only_adapter_is_trained_and_seed_initialises_it(tiny_model_dir, tmp_path):
    states = []
    for seed in (1, 1, 2):
        model = load(tiny_model_dir, tmp_path, Setting(adapter=FRESH), seed=seed)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert all("lora_" in name for name in trained)
        states.append(trained)
    same, other = (all(torch.equal(tensor, states[0][name]) for name, tensor in state.items()) for state in states[1:])
    assert same
    assert not other


@pytest.mark.parametrize("layer", [[0], [0, 1]])
def test_adapter_of_few_layers_is_warned_of(tiny_model_dir, tmp_path, caplog, layer):
    names = [f"layers.{number}.mlp.up_proj" for number in layer]
    load(tiny_model_dir, tmp_path, Setting(adapter=replace(FRESH, lora_target_modules=names)))
    assert ("modules in 1 of 2 layers" in caplog.text) == (len(layer) == 1)


def test_saved_adapter_is_trained_further(tiny_model_dir, tmp_path):
    folder = train_adapter(tiny_model_dir, tmp_path / "adapter")
    continued = AdapterConfig(use_peft=True, adapter_name_or_path=str(folder))
    model = load(tiny_model_dir, tmp_path, Setting(adapter=continued))
    matrices = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert all(parameter.requires_grad and parameter.abs().max() > 0 for parameter in matrices)
    assert len(matrices) == 14


def test_missing_model_or_adapter_is_refused(tiny_model_dir, tmp_path):
    with pytest.raises(ConfigError, match="model_name_or_path"):
        load(tmp_path / "nowhere", tmp_path)
    missing = AdapterConfig(use_peft=True, adapter_name_or_path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="adapter_name_or_path"):
        load(tiny_model_dir, tmp_path, Setting(adapter=missing))


def test_quantization_config_has_compute_dtype_of_run(tiny_model_dir, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "recipes_lib.training.trainers.trained_model.build_quantization_config",
        lambda *facts: calls.append(facts) or None,
    )
    config, args = build(tiny_model_dir, tmp_path, Setting(adapter=FRESH), bf16=True)
    config = replace(config, quantization=QuantizationConfig(load_in_4bit=True))
    load_policy(config, "sdpa", args, LAUNCH)
    assert calls == [(config.quantization, torch.bfloat16, "")]


@pytest.mark.parametrize("use_peft", [False, True])
def test_scorer_returns_one_score_and_does_not_pad_with_eos(tiny_model_dir, tmp_path, use_peft):
    setting = Setting(adapter=FRESH if use_peft else AdapterConfig())
    config, args = build(tiny_model_dir, tmp_path, setting)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = load_scorer(config, "sdpa", args, LAUNCH, tokenizer, [tokenizer.eos_token_id])
    scores = model(input_ids=torch.arange(4, 20)[None], last_positions=torch.tensor([7, 15])).scores
    assert scores.shape == (2,)
    assert any("score" in name and parameter.requires_grad for name, parameter in model.named_parameters())
    assert model.config.pad_token_id not in (None, tokenizer.eos_token_id)

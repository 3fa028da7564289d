"""Of a model of text and pictures the text model and its head are trained, and the rest stays and is saved."""

import pytest
import torch
from tests.models.adapter_models import build_model
from tests.models.vision_models import OUTSIDE, build_gemma3
from transformers import AutoModelForSequenceClassification

from recipes_lib.config.schema import AdapterConfig, ModelConfig
from recipes_lib.models.adapters.lora import add_adapter, check_layers, load_adapter
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.structure import find_layers, find_outside_text, freeze_outside_text, prune_layers

INPUT_IDS = torch.arange(3, 35)[None]


def list_with_gradient(model):
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_what_is_trained_is_what_text_gives_a_gradient(tmp_path):
    expected = list_with_gradient(build_gemma3())
    build_gemma3().save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path), dtype="float32"), "eager")
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected
    assert not any(name.startswith(OUTSIDE) for name in expected)


def test_layers_are_those_of_the_text_model_though_the_vision_tower_has_as_many():
    model = build_gemma3(vision_layers=2)
    assert find_layers(model) is model.model.language_model.layers
    prune_layers(model, [2])
    assert len(model.model.language_model.layers) == model.config.text_config.num_hidden_layers == 1
    assert model.config.vision_config.num_hidden_layers == 2


def test_a_score_head_stays_trained():
    model = build_gemma3(AutoModelForSequenceClassification, num_labels=1)
    freeze_outside_text(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained
    assert trained == {name for name, _ in model.named_parameters() if not name.startswith(OUTSIDE)}


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_all_of_a_model_of_text_is_trained(kind):
    model = build_model(kind)
    assert find_outside_text(model) == []
    freeze_outside_text(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("names", [None, ["q_proj", "v_proj"]])
def test_adapters_stay_inside_the_text_model_and_are_loaded_there(names, tmp_path):
    adapted = add_adapter(build_gemma3(), AdapterConfig(use_peft=True, lora_r=4, lora_target_modules=names), seed=0)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(names or range(7))
    assert all(".language_model.layers." in name for name in trained)
    adapted.save_pretrained(tmp_path)
    loaded = load_adapter(build_gemma3(), str(tmp_path), is_trainable=True, on_any_base=True)
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("key", ["lora_target_modules", "lora_modules_to_save"])
def test_a_layer_of_the_vision_tower_alone_is_unknown(key):
    (problem,) = check_layers(build_gemma3(), AdapterConfig(use_peft=True, **{key: ["fc1"]}))
    assert problem.where == key
    assert "'fc1'" in problem.found

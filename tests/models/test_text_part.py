"""Text training of vision-language models: the text model is trained, the other modules are frozen and saved."""

import pytest
import torch
from safetensors.torch import load_file
from tests.models.adapter_models import SHAPE, build_model
from tests.models.vision_models import OUTSIDE, build_gemma3
from transformers import (
    AutoModelForSequenceClassification,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from recipes_lib.config.schema import AdapterConfig, ModelConfig
from recipes_lib.models.adapters.lora import add_adapter, check_layers, find_targets, load_adapter
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.saved_weights import read_published_shapes
from recipes_lib.models.structure import find_layers, find_outside_text, freeze_outside_text, prune_layers

INPUT_IDS = torch.arange(3, 35)[None]


def list_parameters_with_gradient(model):
    model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_trained_parameters_are_those_with_gradient_from_text(tmp_path):
    expected = list_parameters_with_gradient(build_gemma3())
    build_gemma3().save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path), dtype="float32"), "eager")
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected
    assert not any(name.startswith(OUTSIDE) for name in expected)


def test_encoders_of_a_model_without_text_configuration_are_frozen_and_get_no_adapter():
    encoder = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes = {"audio_config": {**encoder, "num_blocks": 1}, "vision_config": {**encoder, "num_hidden_layers": 1}}
    with torch.device("meta"):
        config = Phi4MultimodalConfig(**SHAPE, **sizes, pad_token_id=0)
        model = Phi4MultimodalForCausalLM(config)
    freeze_outside_text(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("model.embed_tokens_extend.")}
    assert not [path for path in find_targets(model, AdapterConfig()) if "embed_tokens_extend" in path]


def build_qwen3_5():
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(text_config={**text, "num_attention_heads": 4}, vision_config=vision)
    return Qwen3_5ForConditionalGeneration(config)


def test_model_whose_other_modules_transformers_drops_is_cautioned_about(tmp_path, caplog):
    for build, name in ((build_gemma3, "gemma3"), (build_qwen3_5, "qwen3_5")):
        build().save_pretrained(tmp_path / name)
        loaded = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path / name), dtype="float32"), "eager")
        kept = {name.split(".")[1] for name, _ in loaded.named_parameters()} & {"visual", "vision_tower"}
        assert ("transformers loads and saves the text model alone" in caplog.text) == (not kept)


def build_ernie():
    return Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(**SHAPE, moe_intermediate_size=8, moe_num_experts=4, moe_k=2, moe_layer_start_index=1)
    )


def build_hrm():
    return HrmTextForCausalLM(HrmTextConfig(**SHAPE))


@pytest.mark.parametrize("build", [build_ernie, build_hrm])
def test_parameters_that_the_architecture_freezes_stay_frozen_on_loading(build, tmp_path):
    """DDP ends at the second step if a trainable parameter gets no gradient."""
    model = build()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path), dtype="float32"), "eager")
    assert frozen
    assert {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad} == frozen


def test_find_layers_returns_layers_of_text_model():
    model = build_gemma3(vision_layers=2)
    assert find_layers(model) is model.model.language_model.layers
    prune_layers(model, [2])
    assert len(model.model.language_model.layers) == model.config.text_config.num_hidden_layers == 1
    assert model.config.vision_config.num_hidden_layers == 2


def test_score_head_is_trained():
    model = build_gemma3(AutoModelForSequenceClassification, num_labels=1)
    freeze_outside_text(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained
    assert trained == {name for name, _ in model.named_parameters() if not name.startswith(OUTSIDE)}


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_text_only_model_is_trained_completely(kind):
    model = build_model(kind)
    assert find_outside_text(model) == []
    freeze_outside_text(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("names", [None, ["q_proj", "v_proj"]])
def test_adapters_are_added_and_loaded_in_text_model_only(names, tmp_path):
    adapted = add_adapter(build_gemma3(), AdapterConfig(use_peft=True, lora_r=4, lora_target_modules=names), seed=0)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(names or range(7))
    assert all(".language_model.layers." in name for name in trained)
    adapted.save_pretrained(tmp_path)
    loaded = load_adapter(build_gemma3(), str(tmp_path), is_trainable=True, on_any_base=True)
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("key", ["lora_target_modules", "lora_modules_to_save"])
def test_layer_name_of_vision_tower_is_unknown(key):
    (problem,) = check_layers(build_gemma3(), AdapterConfig(use_peft=True, **{key: ["fc1"]}))
    assert problem.where == key
    assert "'fc1'" in problem.found


def keep_all_conversions(model, state_dict, files, load_config, *args):
    """Load as usual, and keep what transformers keeps under ZeRO-3 for saving: the conversions not used too."""
    result = LOAD(model, state_dict, files, load_config, *args)
    model._weight_conversions = load_config.weight_mapping
    return result


LOAD = PreTrainedModel._load_pretrained_model


@pytest.mark.parametrize("load", [LOAD, keep_all_conversions])
def test_model_is_saved_under_the_tensor_names_of_its_checkpoint(load, tmp_path, monkeypatch):
    """``model.layers`` of a text model, ``model.language_model.layers`` of a vision-language model."""
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))
    whole = build_qwen3_5()
    text = Qwen3_5ForCausalLM(whole.config.text_config)
    for name, built in {"whole": whole, "text": text, "gemma3": build_gemma3()}.items():
        built.save_pretrained(tmp_path / name)
        model = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path / name), dtype="float32"), "eager")
        assert read_published_shapes(model).keys() <= load_file(tmp_path / name / "model.safetensors").keys(), name

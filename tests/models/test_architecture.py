"""Models from random weights: defaults from tokenizer and run, reproducible by seed, wrong configurations refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.architecture import (
    build_model_config,
    explaining_model,
    find_model_config,
    start_causal_lm,
)
from recipes_lib.models.loading import check_agreement, load_causal_lm
from recipes_lib.models.parallel.tensor_parallel import build_distribution

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "llama": SMALL,
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": SMALL | {"num_key_value_heads": 2},
    "mixtral": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_model_config_defaults_come_from_tokenizer_and_run(tiny_tokenizer, model_type: str) -> None:
    architecture = {"model_type": model_type} | ARCHITECTURES[model_type]
    config = build_model_config(architecture, tiny_tokenizer, 96)
    assert config.vocab_size == 512
    assert config.max_position_embeddings == 96
    assert (config.bos_token_id, config.eos_token_id) == (None, tiny_tokenizer.eos_token_id)
    assert check_agreement(config, GenerationConfig.from_model_config(config), tiny_tokenizer, max_length=96) == []


def test_vocab_size_covers_ids_of_sparse_tokenizer(sparse_tokenizer) -> None:
    assert len(sparse_tokenizer) == 512
    config = build_model_config({"model_type": "llama"} | SMALL, sparse_tokenizer, 96)
    assert config.vocab_size == 576
    assert check_agreement(config, GenerationConfig.from_model_config(config), sparse_tokenizer) == []


def test_configured_value_wins_under_either_attribute_name(tiny_tokenizer) -> None:
    for spelling in ("n_positions", "max_position_embeddings"):
        written = {"model_type": "gpt2", spelling: 200, "vocab_size": 600}
        config = build_model_config(written, tiny_tokenizer, 96)
        assert (config.n_positions, config.vocab_size) == (200, 600)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_random_weights_follow_seed(tiny_tokenizer, model_type: str) -> None:
    run = ModelConfig(model_config={"model_type": model_type} | ARCHITECTURES[model_type])
    config, _ = find_model_config(run, tiny_tokenizer, 64)
    torch.rand(3)
    one = start_causal_lm(run, config, "sdpa", seed=1)
    same, other = (start_causal_lm(run, config, "sdpa", seed=seed) for seed in (1, 2))
    assert one.training
    assert not one.config.use_cache
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    weights = [dict(model.named_parameters()) for model in (one, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


@pytest.mark.parametrize("model_type", ["t5", "bert", "xlm-roberta"])
def test_model_that_is_not_causal_is_refused_by_its_configuration(model_type, tiny_tokenizer, tmp_path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{model_type} models are not causal language models"):
        find_model_config(ModelConfig(model_name_or_path=str(tmp_path)), tiny_tokenizer, 64)
    with pytest.raises(ConfigError, match=f"model_config: {model_type} models are not causal"):
        find_model_config(ModelConfig(model_config={"model_type": model_type}), tiny_tokenizer, 64)
    with pytest.raises(ConfigError, match=f"model_name_or_path: {model_type} models are not causal"):
        load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path)), "eager")


@pytest.mark.parametrize("architecture", [{"model_type": "bert", "is_decoder": True}, {"model_type": "gpt_neox"}])
def test_decoder_is_accepted(architecture, tiny_tokenizer) -> None:
    find_model_config(ModelConfig(model_config=architecture), tiny_tokenizer, 64)


def test_model_is_loaded_without_model_config(tiny_tokenizer, tiny_model_dir) -> None:
    run = ModelConfig(model_name_or_path=str(tiny_model_dir))
    config, _ = find_model_config(run, tiny_tokenizer, 64)
    assert config.to_dict() == AutoConfig.from_pretrained(tiny_model_dir).to_dict()
    assert start_causal_lm(run, config, "sdpa", seed=0).config.hidden_size == 64


def test_tensor_parallelism_is_verified_before_weights_are_drawn(tiny_tokenizer) -> None:
    run = ModelConfig(model_config={"model_type": "llama"} | SMALL)
    config, distribution = find_model_config(run, tiny_tokenizer, 64)[0], build_distribution({"tp": 3}, torch.float32)
    with pytest.raises(ConfigError, match="no multiple of 3 tensor-parallel ranks"):
        start_causal_lm(run, config, "sdpa", seed=0, distribution=distribution)


LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": None}, {"rope_theta": 1e4, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": LINEAR}, {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}),
    ],
)
def test_keys_of_published_config_files_are_read(tiny_tokenizer, given, expected) -> None:
    published = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "transformers_version": "4.45.0"}
    config = build_model_config(SMALL | published | given | {"model_type": "llama"}, tiny_tokenizer, 64)
    assert expected.items() <= config.rope_parameters.items()
    assert config.dtype is None
    assert LINEAR == {"type": "linear", "factor": 2.0}, "the recipe is unchanged"
    given = {"model_type": "falcon_h1", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert build_model_config(given, tiny_tokenizer, 64).time_step_limit[1] == math.inf


@pytest.mark.parametrize(
    ("architecture", "found", "remedy"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'", "did you mean `llama`?"),
        ({"hidden_size": 8}, "unknown model_type None", "such as llama"),
        ({"model_type": ["llama"]}, "unknown model_type ['llama']", "did you mean `llama`?"),
        ({"model_type": "llama", "hiden_size": 8}, "a llama model has no `hiden_size`", "did you mean `hidden_size`?"),
        ({"model_type": "deepseek_v3", "head_dim": 8}, "a deepseek_v3 model has no `head_dim`", "`v_head_dim`"),
        (SMALL | {"model_type": "llama", "num_key_value_heads": 3}, "`num_key_value_heads` (3) contradict", "heads: 4"),
        (SMALL | {"model_type": "llama", "num_key_value_heads": 8}, "`num_key_value_heads` (8) contradict", "divisor"),
        (SMALL | {"model_type": "deepseek_v3", "num_key_value_heads": 2}, "`num_key_value_heads` (2)", "heads: 4"),
        (SMALL | {"model_type": "llama", "attention_dropout": -0.1}, "`attention_dropout` is -0.1", "a probability"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "`is_encoder_decoder` is True", "write false"),
        ({"model_type": "llama", "output_hidden_states": "yes"}, "`output_hidden_states` is 'yes'", "write false"),
        ({"model_type": "llama", "architectures": 7}, "`architectures` is 7", "a list of class names"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size", "see LlamaConfig"),
        ({"model_type": "qwen2", "use_mrope": False}, "a qwen2 model has no `use_mrope`", "delete it"),
        ({"model_type": "llama", "rope_theta": "5e5 "}, "`rope_theta` is '5e5 '", "a positive number"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 0}}, "`rope_theta` is 0", "a positive number"),
        (
            {"model_type": "llama", "bos_token_id": 512, "eos_token_id": [0, 600]},
            "bos_token_id 512, eos_token_id 600",
            "",
        ),
        ({"model_type": "gpt_neox", "rope_theta": 5e5}, "a gpt_neox model drops `rope_theta`", "`rope_parameters`"),
    ],
)
def test_invalid_model_config_is_refused(tiny_tokenizer, architecture, found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_model_config(architecture, tiny_tokenizer, 64)
    (problem,) = raised.value.problems
    assert problem.where == "model_config"
    assert found in problem.found
    assert remedy in problem.remedy


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_keys_that_only_the_layers_read_have_an_effect(tiny_tokenizer, model_type: str) -> None:
    architecture = SMALL | {"model_type": model_type, "num_key_value_heads": 2, "head_dim": 12}
    config = build_model_config(architecture, tiny_tokenizer, 64)
    model = start_causal_lm(ModelConfig(model_config=architecture), config, "sdpa", seed=0)
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 12
    assert type(config).from_dict(config.to_dict()).head_dim == 12


@pytest.mark.parametrize(
    "architecture",
    [
        {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4},
        SMALL | {"model_type": "llama", "hidden_act": "none"},
        SMALL | {"model_type": "llama", "vocab_size": -8},
        {"model_type": "clip"},
    ],
)
def test_inconsistent_sizes_and_non_causal_models_are_refused(tiny_tokenizer, architecture) -> None:
    run = ModelConfig(model_config=architecture)

    def start() -> None:
        start_causal_lm(run, find_model_config(run, tiny_tokenizer, 64)[0], "sdpa", seed=0)

    with pytest.raises(ConfigError) as raised:
        start()
    assert raised.value.problems[0].where == "model_config"


def test_missing_package_of_an_architecture_is_named() -> None:
    message = "\nTimmWrapperModel requires the timm library. Install it with pip:\n`pip install timm`."
    with (
        pytest.raises(ConfigError, match=r"requires the timm library.*`pip install timm`") as raised,
        explaining_model(AutoConfig.for_model("llama"), "cannot be built", "choose another architecture"),
    ):
        raise ImportError(message)
    assert raised.value.problems[0].remedy == "install the package"

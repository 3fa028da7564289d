"""Pipeline stages against the whole model: names, weights and bitwise equal logits for each architecture."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import sizes
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, LlamaConfig, MixtralConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.architecture import start_causal_lm
from recipes_lib.models.parallel.pipeline_parallel import (
    build_pipeline_stage_class,
    build_whole_on_meta,
    split_into_chunks,
    verify_pipeline_parallel,
)
from recipes_lib.models.parallel.pipeline_part import PipelinePart

SIZES: dict[str, Any] = sizes(
    32, 4, 4, vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "gemma3_text")
IDS = torch.arange(24).view(2, 12) % 64
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)  # Two documents in a row.


def make_config(family: str, **more: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[family](**SIZES | {"eos_token_id": 1, "bos_token_id": 2} | more)
    config._attn_implementation = "sdpa"
    return config


def build_parts(config: PreTrainedConfig, num_stages: int, num_chunks: int = 1) -> list[Any]:
    parts = []
    for stage in range(num_stages):
        torch.manual_seed(0)
        parts.append(
            build_pipeline_stage_class(config, PipelinePart(stage, num_stages, num_chunks))._from_config(config)
        )
    return parts


def build_whole(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def load_stage(folder: Path, config: PreTrainedConfig, part: PipelinePart) -> Any:
    return start_causal_lm(ModelConfig(model_name_or_path=str(folder)), config, "sdpa", seed=0, part=part)


@torch.no_grad()
def run_chunks(parts: list[Any]) -> torch.Tensor:
    """Run the chunks of all stages in order, in one process."""
    numbered = {n: chunk for part in parts for n, chunk in zip(part.part.chunks, split_into_chunks(part), strict=True)}
    inputs: dict[str, Any] = {"input_ids": IDS}
    for number in range(len(numbered) - 1):
        states = numbered[number].base_model(**inputs, position_ids=POSITIONS, use_cache=False).last_hidden_state
        inputs = {"inputs_embeds": states}
    logits: torch.Tensor = numbered[len(numbered) - 1](**inputs, position_ids=POSITIONS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (2, 2)])
def test_stages_together_equal_whole_model(family: str, num_stages: int, num_chunks: int) -> None:
    config = make_config(family)
    whole, parts = build_whole(config), build_parts(config, num_stages, num_chunks)
    with torch.no_grad():
        expected = whole(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    assert torch.equal(run_chunks(parts), expected)
    merged = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    assert merged.keys() == whole.state_dict().keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_in_one_stage_except_tied_embeddings(is_tied: bool) -> None:
    config = make_config("llama", tie_word_embeddings=is_tied)
    parts = build_parts(config, 4)
    held = [set(dict(part.named_parameters())) for part in parts]
    assert set.union(*held) == set(dict(build_whole(config).named_parameters()))
    shared = held[0] & held[3]
    assert shared == ({"model.embed_tokens.weight"} if is_tied else set())
    assert sum(len(names) for names in held) == len(set.union(*held)) + len(shared)
    assert parts[3].lm_head.weight is (parts[3].base_model.embed_tokens.weight if is_tied else parts[3].lm_head.weight)
    assert {name: list(shape) for name, shape in parts[1].whole_shapes.items()} == {
        name: list(tensor.shape) for name, tensor in build_whole(config).named_parameters()
    }


def test_whole_model_is_built_on_meta_from_a_stage() -> None:
    config = make_config("qwen3")
    whole = build_whole_on_meta(build_parts(config, 2)[1])
    assert list(dict(whole.named_parameters())) == list(dict(build_whole(config).named_parameters()))
    assert all(tensor.is_meta for tensor in whole.parameters())


@pytest.mark.parametrize("is_tied", [False, True])
def test_loaded_stage_holds_only_its_parameters(is_tied: bool, tmp_path: Path) -> None:
    config = make_config("llama", tie_word_embeddings=is_tied)
    whole = build_whole(config)
    whole.save_pretrained(tmp_path)
    for stage in range(2):
        part = load_stage(tmp_path, config, PipelinePart(stage, 2))
        assert part.training
        assert all(torch.equal(tensor, whole.get_parameter(name)) for name, tensor in part.named_parameters())
        num_numbers = sum(tensor.numel() for tensor in part.parameters())
        assert num_numbers < 0.75 * sum(tensor.numel() for tensor in whole.parameters())


def test_checkpoint_without_a_parameter_of_the_stage_is_refused(tmp_path: Path) -> None:
    config = make_config("llama")
    whole = build_whole(config)
    state = whole.state_dict()
    del state["model.layers.3.mlp.up_proj.weight"]
    whole.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight"):
        load_stage(tmp_path, config, PipelinePart(1, 2))
    load_stage(tmp_path, config, PipelinePart(0, 2))


def test_random_initialisation_equals_one_process() -> None:
    config = make_config("llama")
    recipe = ModelConfig(model_config={"model_type": "llama"})
    whole = start_causal_lm(recipe, config, "sdpa", seed=3)
    part = start_causal_lm(recipe, config, "sdpa", seed=3, part=PipelinePart(1, 2))
    assert type(part).__name__ == "LlamaForCausalLM"
    assert all(torch.equal(tensor, whole.get_parameter(name)) for name, tensor in part.named_parameters())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**SIZES), ""),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), ""),
        (GPT2Config(vocab_size=64), "has no pipeline-parallel plan"),
        (MixtralConfig(**SIZES, output_router_logits=True), "load-balancing loss of its experts"),
        (GraniteConfig(**SIZES, embedding_multiplier=2.0), "transforms hidden states between"),
        (LlamaConfig(**SIZES | {"num_hidden_layers": 3}), "3 layers cannot be split into 2"),
    ],
    ids=["llama", "tied", "gpt2", "router", "granite", "odd"],
)
def test_verification_result_is_the_same_on_meta_device(config: PreTrainedConfig, why: str) -> None:
    for stage in range(2):
        with pytest.raises(ConfigError, match=why) if why else nullcontext():
            verify_pipeline_parallel(config, PipelinePart(stage, 2))


def test_model_with_computation_between_layers_is_refused() -> None:
    config = GraniteConfig(**SIZES, embedding_multiplier=2.0)
    config._attn_implementation = "sdpa"
    (part, _) = build_parts(config, 2)
    with pytest.raises(ConfigError, match="transforms hidden states between its embedding and its layers"):
        split_into_chunks(part)

"""Models that support tensor parallelism, and verification that every weight is sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from recipes_lib.errors import ConfigError
from recipes_lib.models.parallel.tensor_parallel import (
    build_distribution,
    count_tensor_parallel_ranks,
    distribute,
    find_data_group,
    find_vocabulary_shard,
    verify_tensor_parallel,
)

SIZES = {"vocab_size": 68, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def build_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **SIZES | HEADS | changes)


@pytest.fixture
def two_processes() -> Iterator[None]:
    """This one, and another that is not there: what it would send is left out."""
    distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "mistral", "smollm3", "qwen3", "gemma3_text", "glm4", "olmo2", "phi3"]
)
def test_models_with_verified_plan_are_accepted(model_type: str) -> None:
    config = build_config(model_type)
    config.attention_dropout = 0.0
    verify_tensor_parallel(config, 2)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (AutoConfig.for_model("gpt2"), "tensor parallelism is not supported for a gpt2 model"),
        (AutoConfig.for_model("mixtral", **SIZES, **HEADS), "tensor parallelism is not supported for a mixtral model"),
        # Its embeddings of each layer have no plan.
        (AutoConfig.for_model("gemma3n_text"), "tensor parallelism is not supported for a gemma3n_text model"),
        # Its layers have heads of different sizes.
        (AutoConfig.for_model("gemma4_unified_text"), "not supported for a gemma4_unified_text model"),
        # The whole model has a vision tower.
        (AutoConfig.for_model("gemma3"), "tensor parallelism is not supported for a gemma3 model"),
        (build_config("llama", num_attention_heads=6, hidden_size=24), "num_attention_heads of the model is 6"),
        (build_config("llama", num_key_value_heads=1), "num_key_value_heads of the model is 1"),
        (build_config("llama", vocab_size=66), "vocab_size of the model is 66"),
        (build_config("llama", attention_dropout=0.1), "the model has attention_dropout"),
    ],
)
def test_unsupported_models_are_refused(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        verify_tensor_parallel(config, 4)


def build_default(config_class: Any) -> Any:
    """Its default sizes with four layers, on the meta device; ``None`` if it is refused or has no complete defaults."""
    try:
        config = config_class()
        text = config.get_text_config()
        vars(text).update({name: 0.0 for name in vars(text) if "drop" in name})
        verify_tensor_parallel(config, 1)
        text.num_hidden_layers = 4
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:4]
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (AttributeError, ConfigError, ImportError, KeyError, StrictDataclassError, TypeError, ValueError):
        return None


def test_plans_of_accepted_models_have_every_matrix() -> None:
    models = [model for model in map(build_default, list(MODEL_FOR_CAUSAL_LM_MAPPING)) if model is not None]
    assert len(models) >= 30
    for model in models:
        names = {
            re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight"))
            for name, tensor in model.named_parameters()
            if tensor.ndim > 1
        }
        assert names <= model.tp_plan.keys(), model.config.model_type


def test_no_plan_without_tensor_parallel_size() -> None:
    assert build_distribution({"dp_shard": 8}, torch.float32) is None
    cut = build_distribution({"dp_shard": 4, "tp": 2}, torch.bfloat16)
    assert cut is not None
    assert (cut.tp_size, cut.fsdp_size, cut.fsdp_mixed_precision) == (2, 4, True)


@pytest.mark.usefixtures("two_processes")
def test_verification_detects_unsharded_matrices() -> None:
    whole = AutoModelForCausalLM.from_config(build_config("llama"))
    assert count_tensor_parallel_ranks(whole) == 1
    assert find_data_group(whole) is None
    distribution = build_distribution({"tp": 2}, torch.float32)
    assert distribution is not None
    model: Any = distribute(whole, distribution)
    assert count_tensor_parallel_ranks(model) == 2
    for name, tensor in model.named_parameters():
        if tensor.ndim > 1:
            assert tensor.shape == whole.get_parameter(name).shape
            assert tensor.to_local().numel() < tensor.numel()
    # This process is the second one: it has the last 34 of 68 tokens, and rows of its own.
    own = model.lm_head.weight.to_local()
    torch.testing.assert_close(own, whole.lm_head.weight[34:])
    assert find_vocabulary_shard(model.lm_head.weight).first == 34
    assert distributed.get_world_size(find_data_group(model)) == 1
    mesh = model.lm_head.weight.device_mesh
    model.lm_head.weight = nn.Parameter(DTensor.from_local(whole.lm_head.weight, mesh, [Replicate()]))
    with pytest.raises(ConfigError, match=r"1 of 9 matrices are not sharded, lm_head.weight first"):
        count_tensor_parallel_ranks(model)

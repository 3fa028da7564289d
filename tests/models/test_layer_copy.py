"""Students initialised from a subset of the teacher's layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.models.test_structure import SIZES, build_gpt2, build_llama
from transformers import AutoModelForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM, Qwen2Config, Qwen2ForCausalLM

from recipes_lib.errors import ConfigError
from recipes_lib.models.inference import compute_probe_logits
from recipes_lib.models.structure import prune_layers, verify_copy


def make_qwen2(num_layers: int) -> Any:
    """Layers of two kinds, listed in ``layer_types``."""
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **settings, num_hidden_layers=num_layers, attn_implementation="eager"))


def make_granite_moe(num_layers: int) -> Any:
    """Experts, which round differently after reloading."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_local_experts": 4}
    config = GraniteMoeConfig(**sizes, num_hidden_layers=num_layers, attn_implementation="eager")
    model = GraniteMoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.mark.parametrize("make", [build_llama, build_gpt2, make_qwen2, make_granite_moe])
@pytest.mark.parametrize("layers", [[2, 4], [4, 1, 3], [1, 2, 3, 4]])
def test_selected_layers_are_copied_with_remaining_weights(make, layers, tmp_path) -> None:
    teacher = make(4)
    teacher.config.eos_token_id = [3, 5, 7, 9]  # As many as there are layers.
    cut = copy.deepcopy(teacher)
    prune_layers(cut, layers)
    cut.save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    verify_copy(student, cut, tmp_path)
    own, others = student.state_dict(), teacher.state_dict()
    place = "transformer.h" if make is build_gpt2 else "model.layers"
    for name, tensor in own.items():
        source = name
        if name.startswith(place):
            number, _, rest = name.removeprefix(f"{place}.").partition(".")
            source = f"{place}.{layers[int(number)] - 1}.{rest}"
        assert torch.equal(tensor, others[source]), name
    assert student.config.num_hidden_layers == len(layers)
    assert student.config.eos_token_id == teacher.config.eos_token_id
    if make is make_qwen2:
        assert student.config.layer_types == [teacher.config.layer_types[number - 1] for number in layers]
    is_whole = layers == [1, 2, 3, 4]
    assert torch.equal(compute_probe_logits(student), compute_probe_logits(teacher)) == is_whole


@pytest.mark.parametrize("layers", [[], [0], [5], [1, -1], [2, 1, 2]])
def test_nonexistent_or_repeated_layer_is_refused(layers) -> None:
    with pytest.raises(ConfigError, match="has layers 1 to 4"):
        prune_layers(build_llama(4), layers)


def test_copy_that_differs_from_teacher_is_refused(tmp_path) -> None:
    cut = build_llama(4)
    student = copy.deepcopy(cut)
    with torch.no_grad():
        student.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ConfigError, match=r"the tensor model.layers.2.mlp.up_proj.weight changed when"):
        verify_copy(student, cut, tmp_path)
    student = copy.deepcopy(cut)
    student.model.norm.variance_epsilon = 1.0
    with pytest.raises(ConfigError, match="the logits changed when"):
        verify_copy(student, cut, tmp_path)

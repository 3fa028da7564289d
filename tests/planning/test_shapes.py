"""Shipped model configurations, compared with published parameter counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import stand_ins
from transformers import AutoModelForCausalLM

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError
from recipes_lib.planning.compute import SHIPPED_SHAPES, find_shape


@pytest.mark.parametrize("name", SHIPPED_SHAPES)
def test_shipped_shape_has_published_parameter_count(name) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(find_shape(ModelConfig(model_name_or_path=name)))
    assert model.num_parameters() == stand_ins.SHAPES[name].num_parameters
    assert model.dtype == torch.bfloat16


def test_other_models_are_read_from_their_config(tiny_model_dir: Path) -> None:
    assert find_shape(ModelConfig(model_name_or_path=str(tiny_model_dir))).hidden_size == 64
    with pytest.raises(ConfigError, match="no-such-model"):
        find_shape(ModelConfig(model_name_or_path="runs/no-such-model"))

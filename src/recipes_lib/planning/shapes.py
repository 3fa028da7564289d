"""Configurations of models for a plan: of those that the shipped recipes name without network, cache or licence."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, PreTrainedConfig

from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.loading import load_model_config


@functools.cache
def read_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return the sizes of models by Hub id, in the keys of their ``config.json``."""
    path = Path(__file__).with_name("shapes.yaml")
    shapes: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return shapes


def find_shape(model: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of a model that a plan is made of: the one that is shipped, or the model's own.

    Raises:
        ConfigError: It is none of those that are shipped, and its own cannot be loaded.
    """
    sizes = read_shapes().get(str(model.model_name_or_path))
    if sizes is None:
        return load_model_config(model)[0]
    config: PreTrainedConfig = AutoConfig.for_model(**{"dtype": "bfloat16", **sizes})
    return config

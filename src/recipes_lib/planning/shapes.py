"""Configurations of models for a plan: of those that the shipped recipes name without network, cache or licence."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.architecture import find_model_config
from recipes_lib.models.loading import load_model_config, load_tokenizer


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


def find_planned_model(config: RecipeConfig) -> PreTrainedConfig:
    """Return the architecture; the tokenizer is loaded only if the recipe leaves out ``vocab_size``.

    Raises:
        ConfigError: It is wrong, or neither it nor the tokenizer says how many rows the embedding has.
    """
    if (architecture := config.model.model_config) is None:
        return find_shape(config.model)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
    if "vocab_size" not in architecture:
        try:
            tokenizer = load_tokenizer(config.model, config.tokens)
        except ConfigError as error:
            remedy = "write `vocab_size` in `model_config`: planning needs nothing else from the tokenizer"
            raise ConfigError(*(Problem(one.where, one.found, remedy) for one in error.problems)) from error
    return find_model_config(config.model, tokenizer, config.tokens.max_length)[0]

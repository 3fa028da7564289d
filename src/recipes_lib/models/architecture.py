"""Models from random weights: architecture from the recipe, completed from the tokenizer, initialised by a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.distributed.configuration_utils import DistributedConfig

from recipes_lib.config.schema import ModelConfig
from recipes_lib.config.token_ids import count_ids
from recipes_lib.errors import ConfigError, Problem, suggest
from recipes_lib.models.loading import load_causal_lm, load_model_config
from recipes_lib.models.parallel.pipeline_parallel import build_pipeline_stage_class
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.models.parallel.tensor_parallel import distribute, verify_tensor_parallel
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.structure import freeze_outside_text

VOCAB_MULTIPLE: Final = 64
"""An embedding whose rows are a multiple of this multiplies faster on tensor cores."""

_SPECIAL_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def find_model_config(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Model and generation configuration of a run, from the recipe or from its model.

    Raises:
        ConfigError: ``model_config`` is wrong, or the model's cannot be loaded.
    """
    if config.model_config is None:
        return load_model_config(config)
    model_config = build_model_config(config.model_config, tokenizer, max_length)
    return model_config, GenerationConfig.from_model_config(model_config)


def build_model_config(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> PreTrainedConfig:
    """Build the configuration of a new model.

    Missing values are derived from the run: ``vocab_size`` (one row per token id, rounded up to a multiple of 64), the
    ids of special tokens, and as many positions as a row has tokens.

    Args:
        architecture: ``model_config``: ``model_type`` and keys of its ``config.json``.
        tokenizer: The run's.
        max_length: Tokens of a row.

    Raises:
        ConfigError: The ``model_type`` is unknown or no causal language model, it has no such key, or a value is of the
            wrong kind; every wrong key at once.
    """
    given = dict(architecture)
    model_type = given.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remedy = suggest(model_type, CONFIG_MAPPING.keys(), "write one that transformers has, such as llama")
        raise ConfigError(Problem("model_config", f"unknown model_type {model_type!r}", remedy))
    config_class = CONFIG_MAPPING[model_type]
    aliases = getattr(config_class, "attribute_map", {})
    known = {field.name for field in dataclasses.fields(config_class)} | set(aliases)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(*(_explain_unknown(key, model_type, known) for key in unknown))
    # Rounded up.
    rows = -(-count_ids(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    derived: dict[str, Any] = {"vocab_size": rows, "max_position_embeddings": max_length}
    derived |= {name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS}
    # Some architectures have two names for a value, such as `n_embd` and `hidden_size`.
    spelled = {aliases.get(key, key) for key in given}
    # A special token that the tokenizer lacks is written as None: a class has defaults of its own, such as 2.
    given |= {
        aliases.get(key, key): value
        for key, value in derived.items()
        if key in known and aliases.get(key, key) not in spelled and (value is not None or key in _SPECIAL_TOKENS)
    }
    try:
        model_config: PreTrainedConfig = AutoConfig.for_model(model_type, **given)
    except (StrictDataclassError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(Problem("model_config", _first_line(error), f"see {config_class.__name__}")) from error
    return model_config


def start_causal_lm(
    config: ModelConfig,
    model_config: PreTrainedConfig,
    attn_implementation: str,
    *,
    seed: int,
    part: PipelinePart | None = None,
    distribution: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Return the start model in training mode: loaded, or initialised from ``seed``.

    Of a pretrained model, no process reads more than its shard. Random weights are initialised in full on every host,
    so that they equal those of one process; unused ones are freed.

    Args:
        config: Which model.
        model_config: As ``find_model_config`` found it.
        attn_implementation: As ``choose_attention`` settled it.
        seed: Of random weights.
        part: What this process of a pipeline holds; ``None`` is all.
        distribution: As for ``load_causal_lm``.

    Raises:
        ConfigError: It cannot be loaded, or the architecture is no causal language model or contradicts itself.
        ConfigError: As ``build_pipeline_stage_class`` and ``verify_tensor_parallel``.
    """
    model_class: Any = AutoModelForCausalLM if part is None else build_pipeline_stage_class(model_config, part)
    if config.model_config is None:
        return load_causal_lm(config, attn_implementation, model_class=model_class, distribution=distribution)
    if distribution is not None:
        verify_tensor_parallel(model_config, distribution.tp_size or 1)
    # Every process initialises the same weights, whatever random numbers were used before.
    set_seed(seed)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    build = model_class.from_config if part is None else model_class._from_config
    try:
        # Initialisation under ZeRO-3 would give other values; the engine shards these weights later.
        with zero3_init_disabled():
            model: PreTrainedModel = build(model_config, attn_implementation=attn_implementation, dtype=dtype)
    except (KeyError, ValueError, RuntimeError, ZeroDivisionError) as error:
        found = f"a {model_config.model_type} model cannot be built: {_first_line(error)}"
        raise ConfigError(Problem("model_config", found, "check the sizes against each other")) from error
    freeze_outside_text(model)
    if distribution is not None:
        model = distribute(model, distribution)
    model.config.use_cache = False
    model.train()
    return model


def _explain_unknown(key: str, model_type: str, known: set[str]) -> Problem:
    remedy = suggest(key, known, "see the model's documentation in transformers")
    return Problem("model_config", f"a {model_type} model has no `{key}`", remedy)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

"""Randomly initialised models: configuration from the recipe, completed from the tokenizer; seeded weights."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._pytree import tree_leaves
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
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
from recipes_lib.config.tokenization import count_ids
from recipes_lib.errors import ConfigError, Problem, read_last_line, suggest
from recipes_lib.models.loading import SPECIAL_TOKENS, describe_ids_beyond, load_causal_lm, load_model_config
from recipes_lib.models.parallel.pipeline_parallel import build_pipeline_stage_class
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.models.parallel.tensor_parallel import distribute, verify_tensor_parallel
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.structure import freeze_outside_text, verify_causal, verify_settings

_MOVED: Final = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys in published ``config.json`` files that transformers moves into ``rope_parameters``."""
VOCAB_MULTIPLE: Final = 64
"""Vocabulary sizes are rounded up to a multiple of this, which is faster on tensor cores."""


def find_model_config(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Return the model and generation configuration of a run, from ``model_config`` or the pretrained model.

    Args:
        config: Name of the pretrained model, or ``model_config``.
        tokenizer: Tokenizer of the run.
        max_length: Maximum length of a row in tokens.

    Raises:
        ConfigError: ``model_config`` is invalid, the model's configuration cannot be loaded, or it is not that of a
            causal language model.
    """
    if config.model_config is None:
        key, (model_config, generation_config) = "model_name_or_path", load_model_config(config)
    else:
        key, model_config = "model_config", build_model_config(config.model_config, tokenizer, max_length)
        generation_config = GenerationConfig.from_model_config(model_config)
    verify_causal(key, model_config)
    return model_config, generation_config


def build_model_config(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> PreTrainedConfig:
    """Build the configuration of a new model.

    Missing values are derived from the run: ``vocab_size`` (the number of token ids, rounded up to a multiple of 64),
    the ids of special tokens, and ``max_position_embeddings``.

    Args:
        architecture: ``model_config`` of the recipe: ``model_type`` and keys of its ``config.json``.
        tokenizer: Tokenizer of the run.
        max_length: Maximum length of a row in tokens.

    Raises:
        ConfigError: The ``model_type`` is unknown, it does not have a key, or a value is invalid; one problem per
            unknown key. Or the tokenizer lacks an id of a special token; or as ``verify_settings``.
    """
    # Published files have null for what they lack, and infinity as a mapping (Mamba's `time_step_limit`).
    given = {key: value for key, value in architecture.items() if key not in _MOVED or value is not None}
    # This copies, too: transformers adds to nested mappings.
    given = PreTrainedConfig._decode_special_floats(given)
    model_type = given.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remedy = suggest(model_type or "", CONFIG_MAPPING.keys(), "write one that transformers has, such as llama")
        raise ConfigError(Problem("model_config", f"unknown model_type {model_type!r}", remedy))
    config_class = CONFIG_MAPPING[model_type]
    aliases = getattr(config_class, "attribute_map", {})
    known = {field.name for field in dataclasses.fields(config_class)} | set(aliases) | _list_optional(config_class)
    known |= _MOVED if "rope_parameters" in known else set()
    given.pop("torch_dtype", None)  # In published files: that of the weights, which the recipe's `dtype` sets.
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(*(_explain_unknown(key, model_type, known) for key in unknown))
    # Ceiling division.
    rows = -(-count_ids(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    derived: dict[str, Any] = {"vocab_size": rows, "max_position_embeddings": max_length}
    derived |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    # Some architectures have two names for a value, such as `n_embd` and `hidden_size`.
    spelled = {aliases.get(key, key) for key in given}
    # None for special tokens that the tokenizer lacks: otherwise the defaults of the class apply, such as 2.
    given |= {
        aliases.get(key, key): value
        for key, value in derived.items()
        if key in known and aliases.get(key, key) not in spelled and (value is not None or key in SPECIAL_TOKENS)
    }
    try:
        model_config: PreTrainedConfig = AutoConfig.for_model(model_type, **given)
    except (StrictDataclassError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(Problem("model_config", read_last_line(error), f"see {config_class.__name__}")) from error
    if beyond := describe_ids_beyond(count_ids(tokenizer), model_config.get_text_config()):
        raise ConfigError(Problem("model_config", beyond, "delete the ids: those of the tokenizer are taken"))
    verify_settings("model_config", model_config)
    _verify_rope({key: given[key] for key in sorted(_MOVED & given.keys())}, model_config)
    return model_config


def find_other_vocabulary(config: ModelConfig, policy: PreTrainedConfig) -> str:
    """Return how the vocabulary size of a model differs from the policy's; empty if it does not.

    Raises:
        ConfigError: As ``load_model_config``.
    """
    size, own = (each.get_text_config().vocab_size for each in (load_model_config(config)[0], policy))
    found = f"{config.model_name_or_path} has a vocabulary of {size:,} tokens and the policy one of {own:,}"
    return "" if size == own else found


def start_causal_lm(
    config: ModelConfig,
    model_config: PreTrainedConfig,
    attn_implementation: str,
    *,
    seed: int,
    part: PipelinePart | None = None,
    distribution: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Return the initial model of a run in training mode: pretrained, or with random weights.

    Ranks read only their shards of a pretrained model. Random weights are initialised in full on every rank, so that
    they equal those of a single process, and then sharded.

    Args:
        config: Name of the pretrained model, or ``model_config``.
        model_config: Result of ``find_model_config``.
        attn_implementation: Attention kernel from ``choose_attention``.
        seed: Seed of random weights.
        part: Pipeline stage of this rank; ``None`` without pipeline parallelism.
        distribution: Result of ``build_distribution``; ``None`` without tensor parallelism.

    Raises:
        ConfigError: As ``load_causal_lm``, ``build_pipeline_stage_class`` and ``verify_tensor_parallel``; or the
            configuration is not that of a causal language model, or its sizes contradict each other.
    """
    model_class: Any = AutoModelForCausalLM if part is None else build_pipeline_stage_class(model_config, part)
    if distribution is not None:
        verify_tensor_parallel(model_config, distribution.tp_size or 1)
    if config.model_config is None:
        return load_causal_lm(config, attn_implementation, model_class=model_class, distribution=distribution)
    # The same weights on every process, independent of random numbers drawn before.
    set_seed(seed)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    build = model_class.from_config if part is None else model_class._from_config
    # Not partitioned yet: under ZeRO-3, transformers would draw other values. The engine partitions them later.
    with zero3_init_disabled(), explaining_model(model_config, "cannot be built", "check the sizes against each other"):
        model: PreTrainedModel = build(model_config, attn_implementation=attn_implementation, dtype=dtype)
    freeze_outside_text(model)
    if distribution is not None:
        model = distribute(model, distribution)
    model.config.use_cache = False
    model.train()
    return model


@contextmanager
def explaining_model(config: PreTrainedConfig, problem: str, remedy: str) -> Iterator[None]:
    """Context in which an error of a model's code is raised as a ``ConfigError``: ``a MODEL_TYPE model PROBLEM: ...``.

    Raises:
        ConfigError: The code in the context has raised an error; the code of an architecture may raise any.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = read_last_line(error)
        if isinstance(error, ImportError):  # As of timm, for Gemma 3n; the message has two lines.
            reason, remedy = " ".join(str(error).split()), "install the package"
        found = f"a {config.model_type} model {problem}: {reason:.300}"
        raise ConfigError(Problem("model_config", found, remedy)) from error


def _list_optional(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the keys without a field of the class that layers read if they are set, as ``head_dim`` of Qwen3 MoE."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    source = inspect.getsource(sys.modules[model_class.__module__]) if model_class else ""
    return set(re.findall(r'self\.(\w+) = getattr\(config, "\1"', source))


def _verify_rope(moved: Mapping[str, Any], model_config: PreTrainedConfig) -> None:
    """Raise a ``ConfigError`` for a base that is no positive number, for which torch would raise or give NaN.

    And for keys of ``_MOVED`` that a class with defaults of its own drops, such as that of GPT-NeoX.
    """
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    found, problems = tree_leaves(rope), []
    for layer in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        base = layer.get("rope_theta", 1.0)
        if not isinstance(base, int | float) or not base > 0:
            problems.append(Problem("model_config", f"`rope_theta` is {base!r}", "write a positive number: 10000.0"))
    for key, value in moved.items():
        if not all(one is None or one in found for one in tree_leaves(value)):
            dropped = f"a {model_config.model_type} model drops `{key}`"
            problems.append(Problem("model_config", dropped, "write it in `rope_parameters`"))
    if problems:
        raise ConfigError(*problems)


def _explain_unknown(key: str, model_type: str, known: set[str]) -> Problem:
    remedy = suggest(key, known, "delete it: transformers does not read it")
    return Problem("model_config", f"a {model_type} model has no `{key}`", remedy)

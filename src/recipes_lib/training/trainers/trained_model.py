"""Load the model that is trained: configuration check, quantisation, adapter or score head."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, reported_at
from recipes_lib.models.adapters.lora import add_adapter, find_bare_layers
from recipes_lib.models.adapters.saved import TaskType
from recipes_lib.models.architecture import find_model_config, start_causal_lm
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model, set_pad_token
from recipes_lib.models.inference import disable_dropout
from recipes_lib.models.loading import check_agreement, choose_teacher, load_causal_lm, load_model_config
from recipes_lib.models.parallel.tensor_parallel import build_distribution
from recipes_lib.models.quantization import build_quantization_config, check_quantization
from recipes_lib.models.vocabulary import VocabularyMap
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers.arguments import get_compute_dtype

logger = logging.getLogger(__name__)

TEACHER = "teacher_model_name_or_path"
"""Key of the teacher's name or path."""


def load_verified_config(
    config: RecipeConfig,
    tokenizer: PreTrainedTokenizerBase,
    longest: int | None,
    vocabulary: VocabularyMap | None = None,
) -> PreTrainedConfig:
    """Load the configuration of ``config.model`` and verify it with tokenizer and data, before any weight is loaded.

    Training and ``recipes check`` both call this function, so both reject the same configurations.

    Args:
        config: The run.
        tokenizer: The model's tokenizer.
        longest: Tokens of the longest prepared row, including a sampled answer of maximum length in reinforcement
            learning; ``None`` if unknown.
        vocabulary: From ``map_teacher_vocabulary`` for a run with a teacher, whose configuration is verified too.

    Raises:
        ConfigError: As ``find_model_config``.
        ConfigError: A token of the tokenizer has no embedding, the beginning-of-sequence tokens of model and tokenizer
            differ, the longest row exceeds the model's positions, or the checkpoint is quantised to other bits.
    """
    max_length = config.tokens.max_length
    model_config, generation_config = find_model_config(config.model, tokenizer, max_length)
    problems = check_agreement(model_config, generation_config, tokenizer, max_length=longest)
    problems += check_quantization(str(config.model.model_name_or_path), model_config, config.quantization)
    if vocabulary is not None:
        where = config.locate(TEACHER)
        with reported_at(where):
            teacher = load_model_config(choose_teacher(config))
        problems += [
            replace(problem, where=where)
            for problem in check_agreement(*teacher, tokenizer, max_length=longest)
            # A mapped vocabulary has its own ids: only the length is comparable.
            if vocabulary.is_identity or problem.where == "max_length"
        ]
    if problems:
        raise ConfigError(*problems)
    return model_config


def load_language_model(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    attn_implementation: str,
    args: TrainingArguments,
    launch: Launch,
) -> PreTrainedModel:
    """Load ``config.model`` or initialise it from random weights, with the launch's tensor or pipeline parallelism.

    Args:
        config: The run.
        model_config: Configuration of the model.
        attn_implementation: Implementation of ``choose_attention``.
        args: Compute dtype, and seed of random weights.
        launch: Tensor parallelism, sharding, and the pipeline stage of this rank.

    Raises:
        ConfigError: As ``start_causal_lm``.
    """
    distribution = build_distribution(launch.layout.sizes, get_compute_dtype(args))
    return start_causal_lm(
        config.model,
        model_config,
        attn_implementation,
        seed=args.seed,
        part=launch.part,
        distribution=distribution,
    )


def load_policy(config: RecipeConfig, attn_implementation: str, args: TrainingArguments, launch: Launch) -> Any:
    """Load ``config.model`` for training, quantised and with an adapter if configured.

    Args:
        config: The run: model, dtype, quantisation and adapter.
        attn_implementation: Implementation of ``choose_attention`` or ``choose_pair_attention``.
        args: Compute dtype, seed of a new adapter, and ``disable_dropout``.
        launch: Its engine determines the storage dtype of quantised weights, which FSDP2 must be able to shard.

    Returns:
        A causal language model, or a PEFT model around it.

    Raises:
        ConfigError: As ``load_causal_lm``, ``build_quantization_config`` and ``add_adapter``.
    """
    quantization = build_quantization_config(config.quantization, get_compute_dtype(args), launch.engine)
    model = load_causal_lm(config.model, attn_implementation, quantization)
    return _finish(model, config, args, "CAUSAL_LM")


def load_scorer(
    config: RecipeConfig,
    attn_implementation: str,
    args: TrainingArguments,
    launch: Launch,
    tokenizer: PreTrainedTokenizerBase,
    terminators: Iterable[int],
) -> Any:
    """Load ``config.model`` with a score head for training, quantised and with an adapter if configured.

    Args:
        config: The run, as for ``load_policy``.
        attn_implementation: As ``load_policy``.
        args: As ``load_policy``; its seed also initialises a new head.
        launch: As ``load_policy``.
        tokenizer: The model's tokenizer.
        terminators: Token ids that can end an answer.

    Returns:
        A model with a score head on it (``add_score_head``), or a PEFT model around it.

    Raises:
        ConfigError: As ``load_reward_model``, ``set_pad_token``, ``build_quantization_config`` and ``add_adapter``.
    """
    quantization = build_quantization_config(config.quantization, get_compute_dtype(args), launch.engine)
    model = load_reward_model(config.model, attn_implementation, seed=args.seed, quantization=quantization)
    set_pad_token(model, tokenizer, terminators)
    add_score_head(model)
    return _finish(model, config, args, "SEQ_CLS")


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Add a loss head to a reference, base or teacher model, freeze it and switch it to evaluation mode; in place."""
    add_loss_head(model)
    model.requires_grad_(False)
    model.train(False)
    return model


def _finish(model: PreTrainedModel, config: RecipeConfig, args: TrainingArguments, task_type: TaskType) -> Any:
    finished: Any = model
    if config.adapter.use_peft:
        if caution := find_bare_layers(model, config.adapter):
            logger.warning(caution)
        finished = add_adapter(model, config.adapter, seed=args.seed, task_type=task_type)
    if getattr(args, "disable_dropout", False):
        disable_dropout(finished)
    return finished

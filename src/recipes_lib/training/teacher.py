"""The model that a student learns from: loaded frozen, in the student's vocabulary, proved on the student's batches."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.attention import AttentionChoice, choose_attention, prove_isolation
from recipes_lib.models.heads import add_loss_head, verify_loss_head
from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.models.vocabulary import VocabularyMap, adopt_vocabulary, map_vocabulary
from recipes_lib.models.zero3 import loaded_whole

TEACHER = "teacher_model_name_or_path"
"""The key that names it."""


def choose_teacher(config: RecipeConfig) -> ModelConfig:
    """Return the teacher as models are loaded: from its own name and revision, in its own precision."""
    distillation = config.distillation
    return replace(
        config.model,
        model_name_or_path=distillation.teacher_model_name_or_path,
        model_revision=distillation.teacher_model_revision,
        dtype=distillation.teacher_dtype,
        tokenizer_name_or_path=None,
        tokenizer_revision=None,
    )


def map_teacher_vocabulary(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> VocabularyMap:
    """Compare the teacher's tokenizer with the student's, before any weight is loaded.

    Raises:
        ConfigError: As ``map_vocabulary``; or the teacher's tokenizer cannot be loaded.
    """
    where = config.provenance.get(TEACHER, TEACHER)
    try:
        other = load_tokenizer(choose_teacher(config), TokensConfig(eos_token=tokenizer.eos_token))
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return map_vocabulary(tokenizer, other, where)


def load_teacher(
    config: RecipeConfig, attention: AttentionChoice, args: TrainingArguments, vocabulary: VocabularyMap
) -> PreTrainedModel:
    """Load the teacher: frozen, in evaluation mode, reading and predicting the student's tokens.

    Args:
        config: The run.
        attention: Of the student, whose batches the teacher reads.
        args: Precision of the products.
        vocabulary: From ``map_teacher_vocabulary``.

    Raises:
        ConfigError: It cannot be loaded, cannot read batches so laid out, has another vocabulary than its tokenizer, or
            an output projection that is unknown here.
    """
    chosen, where = choose_teacher(config), config.provenance.get(TEACHER, TEACHER)
    try:
        model_config, _ = load_model_config(chosen)
        requested = replace(chosen, attn_implementation=attention.implementation)
        choose_attention(requested, model_config, args, packing=config.tokens.packing)
        # Its rows are put into the student's order, which nobody could who has a share of them.
        with loaded_whole():
            teacher = load_causal_lm(chosen, attention.implementation)
        teacher.requires_grad_(False)
        teacher.train(False)
        adopt_vocabulary(teacher, vocabulary, where)
        add_loss_head(teacher)
        verify_loss_head(teacher)
        if config.tokens.packing:
            prove_isolation(teacher, attention.layout)
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return teacher


def is_own_teacher(config: RecipeConfig) -> bool:
    """Return whether a student begins as a copy of its teacher."""
    teacher, student = choose_teacher(config), config.model
    return (teacher.model_name_or_path, teacher.model_revision) == (student.model_name_or_path, student.model_revision)
